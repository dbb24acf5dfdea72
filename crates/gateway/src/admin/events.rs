//! What happened, for `/admin/v1/events`: numbered, with a bounded backlog, so that a listener that comes back can
//! go on where it stopped and is told what it has missed.

use serde_json::Value;
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::watch;

/// Events kept for listeners that come later or fall behind.
pub const EVENT_BACKLOG_MAX: usize = 4096;

/// One event.
#[derive(Debug, Clone, PartialEq)]
pub struct LoggedEvent {
    /// Its number, from 1.
    pub id: u64,
    /// What kind of thing happened, for SSE's `event:`; lower case with underscores.
    pub kind: &'static str,
    /// Everything about it.
    pub data: Value,
}

/// The latest events. Cheap to write to: a slow listener never holds the writer up.
#[derive(Debug)]
pub struct EventLog {
    kept: Mutex<VecDeque<Arc<LoggedEvent>>>,
    last: watch::Sender<u64>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { kept: Mutex::default(), last: watch::channel(0).0 }
    }
}

/// What a listener gets next.
#[derive(Debug, Clone, PartialEq)]
pub enum Next {
    /// An event.
    Event(Arc<LoggedEvent>),
    /// Events after `after` and before `next` are no longer kept.
    Gap {
        /// The last event the listener has had.
        after: u64,
        /// The next one there is.
        next: u64,
    },
}

impl EventLog {
    /// Writes an event and returns its number.
    pub fn publish(&self, kind: &'static str, data: Value) -> u64 {
        let mut kept = self.locked();
        let id = *self.last.borrow() + 1;
        if kept.len() == EVENT_BACKLOG_MAX {
            kept.pop_front();
        }
        kept.push_back(Arc::new(LoggedEvent { id, kind, data }));
        self.last.send_replace(id);
        id
    }

    /// Reads from the event after number `after`; 0 begins with the oldest kept.
    pub fn subscribe(self: &Arc<Self>, after: u64) -> Subscription {
        Subscription { log: self.clone(), after, changed: self.last.subscribe() }
    }

    /// The last events, at most `count`, the oldest first.
    pub fn recent(&self, count: usize) -> Vec<Arc<LoggedEvent>> {
        let kept = self.locked();
        kept.iter().skip(kept.len().saturating_sub(count)).cloned().collect()
    }

    /// The number of the last event, 0 if there was none.
    pub fn last_id(&self) -> u64 {
        *self.last.borrow()
    }

    fn locked(&self) -> MutexGuard<'_, VecDeque<Arc<LoggedEvent>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn after(&self, after: u64) -> Option<Next> {
        let kept = self.locked();
        let first = kept.front()?.id;
        if after + 1 < first {
            // A listener that begins with "everything" has missed nothing it knew of.
            return match after {
                0 => kept.front().cloned().map(Next::Event),
                _ => Some(Next::Gap { after, next: first }),
            };
        }
        let index = usize::try_from(after + 1 - first).ok()?;
        kept.get(index).cloned().map(Next::Event)
    }
}

/// One listener's place in the log.
#[derive(Debug)]
pub struct Subscription {
    log: Arc<EventLog>,
    after: u64,
    changed: watch::Receiver<u64>,
}

impl Subscription {
    /// Waits for the next event. Safe to drop and call again.
    pub async fn next(&mut self) -> Next {
        loop {
            self.changed.mark_unchanged();
            if let Some(next) = self.log.after(self.after) {
                self.after = match &next {
                    Next::Event(event) => event.id,
                    Next::Gap { next, .. } => next - 1,
                };
                return next;
            }
            // The sender lives in the log that this subscription holds, so it cannot close.
            let _ = self.changed.changed().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[tokio::test]
    async fn a_listener_goes_on_where_it_stopped() {
        let log = Arc::new(EventLog::default());
        for number in 1..=3 {
            assert_eq!(log.publish("thing", json!(number)), number);
        }
        let mut listener = log.subscribe(1);
        let Next::Event(event) = listener.next().await else { panic!("no event") };
        assert_eq!((event.id, &event.data), (2, &json!(2)));
        let mut late = log.subscribe(3);
        let waiting = tokio::spawn(async move { late.next().await });
        log.publish("thing", json!(4));
        let Next::Event(event) = waiting.await.unwrap() else { panic!("no event") };
        assert_eq!(event.id, 4);
    }

    #[tokio::test]
    async fn the_backlog_is_bounded_and_a_gap_is_told() {
        let log = Arc::new(EventLog::default());
        let total = u64::try_from(EVENT_BACKLOG_MAX).unwrap() + 10;
        for number in 0..total {
            log.publish("thing", json!(number));
        }
        assert_eq!(log.recent(2).iter().map(|event| event.id).collect::<Vec<_>>(), [total - 1, total]);
        assert_eq!(log.recent(usize::MAX).len(), EVENT_BACKLOG_MAX);
        let mut listener = log.subscribe(5);
        assert_eq!(listener.next().await, Next::Gap { after: 5, next: 11 });
        let Next::Event(event) = listener.next().await else { panic!("no event") };
        assert_eq!(event.id, 11);
        let Next::Event(first) = log.subscribe(0).next().await else { panic!("no event") };
        assert_eq!(first.id, 11);
    }
}
