//! Carries the replies of one try of one request from the worker to its caller, and what they mean to the run loop.
//!
//! It outlives a caller that goes away: the slot at the worker is free only when the worker says so.

use crate::{
    frontend::{REPLIES_BEHIND_MAX, Update},
    metrics::Metrics,
    run_loop::Message,
};
use std::{sync::Arc, time::Duration};
use tokio::sync::mpsc::{self, error::TrySendError};
use warmset_core::{
    ModelName, RequestId, TenantId,
    gateway::Event,
    inference::{Reply, Usage},
    worker::Rejection,
};

/// How often a waiting pump looks at what piles up behind it.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Whose tokens are counted, and where. They are counted when the worker says what was computed, whether anybody still
/// waits for the answer or not: once, since a request is finished once.
#[derive(Clone)]
pub(crate) struct Tally {
    metrics: Arc<Metrics>,
    account: Option<Arc<(ModelName, TenantId)>>,
}

impl Tally {
    pub(crate) fn new(metrics: Arc<Metrics>, model: Option<ModelName>, tenant: &TenantId) -> Self {
        Self { metrics, account: model.map(|model| Arc::new((model, tenant.clone()))) }
    }

    fn count(&self, usage: Usage) {
        if let Some((model, tenant)) = self.account.as_deref() {
            self.metrics.record_tokens(model.as_str(), tenant.as_str(), usage);
        }
    }
}

/// One try of one request.
pub(crate) struct Pump {
    pub(crate) request: RequestId,
    pub(crate) attempt: u32,
    pub(crate) replies: mpsc::UnboundedReceiver<Reply>,
    pub(crate) updates: mpsc::Sender<Update>,
    pub(crate) messages: mpsc::UnboundedSender<Message>,
    pub(crate) tally: Tally,
    pub(crate) stall_timeout: Duration,
}

impl Pump {
    pub(crate) async fn run(mut self) {
        let (mut output_started, mut wanted) = (false, true);
        while let Some(reply) = self.replies.recv().await {
            let request = self.request;
            let last = match &reply {
                Reply::Queued { .. } | Reply::Loading { .. } | Reply::Parked | Reply::Resumed => None,
                Reply::Started { start, .. } => {
                    self.report(Event::Started { request, start: *start });
                    None
                }
                Reply::Logprobs { .. }
                | Reply::Delta { .. }
                | Reply::ToolCall { .. }
                | Reply::ToolArguments { .. }
                | Reply::StopText { .. }
                | Reply::ChoiceDone { .. } => {
                    output_started = true;
                    None
                }
                Reply::Done { usage, .. } => {
                    self.tally.count(*usage);
                    let (prompt_tokens, completion_tokens) = (usage.prompt_tokens, usage.completion_tokens);
                    Some(Event::Finished { request, prompt_tokens, completion_tokens })
                }
                Reply::Embedded { prompt_tokens, .. } => {
                    self.tally.count(Usage { prompt_tokens: *prompt_tokens, ..Usage::default() });
                    Some(Event::Finished { request, prompt_tokens: *prompt_tokens, completion_tokens: 0 })
                }
                Reply::Failed { .. } => Some(Event::Failed { request }),
                Reply::Rejected(rejection) => {
                    self.report(Event::Rejected { request, rejection: seen(rejection.clone(), output_started) });
                    return;
                }
            };
            if wanted && !self.forward(Update::Reply(reply)).await {
                wanted = false;
                // The ticket says so too when it is dropped; a caller that merely reads too slowly does not.
                let _ = self.messages.send(Message::Dropped { request });
            }
            if let Some(event) = last {
                self.report(event);
                return;
            }
        }
        let message = "the worker lost the request".to_owned();
        let rejection = Rejection::EngineLost { message, output_started };
        self.report(Event::Rejected { request: self.request, rejection });
    }

    /// Passes one update on; false if the caller is gone or reads too slowly.
    async fn forward(&self, update: Update) -> bool {
        let update = match self.updates.try_send(update) {
            Ok(()) => return true,
            Err(TrySendError::Closed(_)) => return false,
            Err(TrySendError::Full(update)) => update,
        };
        let stalled = tokio::time::sleep(self.stall_timeout);
        tokio::pin!(stalled);
        loop {
            tokio::select! {
                biased;
                permit = self.updates.reserve() => {
                    return permit.map(|permit| permit.send(update)).is_ok();
                }
                () = &mut stalled => return false,
                () = tokio::time::sleep(LOOK_INTERVAL), if self.replies.len() <= REPLIES_BEHIND_MAX => {}
                () = std::future::ready(()), if self.replies.len() > REPLIES_BEHIND_MAX => return false,
            }
        }
    }

    fn report(&self, event: Event) {
        // A run loop that is gone needs no reports.
        let _ = self.messages.send(Message::Report { request: self.request, attempt: self.attempt, event });
    }
}

/// A rejection with what was seen here: text that has passed cannot be called back.
fn seen(rejection: Rejection, output_seen: bool) -> Rejection {
    match rejection {
        Rejection::EngineLost { message, output_started } => {
            Rejection::EngineLost { message, output_started: output_started || output_seen }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmset_core::inference::Timings;

    const LONG: Duration = Duration::from_secs(600);

    fn delta() -> Reply {
        Reply::Delta { choice: 0, text: "x".to_owned() }
    }

    fn pump(
        capacity: usize,
        stall_timeout: Duration,
    ) -> (Pump, mpsc::UnboundedSender<Reply>, mpsc::Receiver<Update>, mpsc::UnboundedReceiver<Message>) {
        let (replies_in, replies) = mpsc::unbounded_channel();
        let (updates, updates_out) = mpsc::channel(capacity);
        let (messages, messages_out) = mpsc::unbounded_channel();
        let tally = Tally::new(Arc::default(), ModelName::parse("m").ok(), &TenantId::anonymous());
        let pump = Pump { request: RequestId(1), attempt: 1, replies, updates, messages, tally, stall_timeout };
        (pump, replies_in, updates_out, messages_out)
    }

    #[tokio::test]
    async fn output_seen_here_is_output_started() {
        let (pump, replies, _updates, mut messages) = pump(8, LONG);
        replies.send(delta()).unwrap();
        let rejection = Rejection::EngineLost { message: "gone".into(), output_started: false };
        replies.send(Reply::Rejected(rejection)).unwrap();
        pump.run().await;
        let Some(Message::Report { event: Event::Rejected { rejection, .. }, .. }) = messages.recv().await else {
            panic!("no rejection");
        };
        assert_eq!(rejection, Rejection::EngineLost { message: "gone".into(), output_started: true });
    }

    #[tokio::test]
    async fn a_channel_that_closes_early_is_a_lost_request() {
        let (pump, replies, _updates, mut messages) = pump(8, LONG);
        drop(replies);
        pump.run().await;
        let Some(Message::Report { event: Event::Rejected { rejection, .. }, .. }) = messages.recv().await else {
            panic!("no rejection");
        };
        assert!(matches!(rejection, Rejection::EngineLost { output_started: false, .. }));
    }

    #[tokio::test]
    async fn a_caller_that_does_not_read_is_cut_and_its_slot_is_still_accounted_for() {
        let (pump, replies, updates, mut messages) = pump(2, Duration::ZERO);
        for _ in 0..5 {
            replies.send(delta()).unwrap();
        }
        let usage = Usage { prompt_tokens: 3, completion_tokens: 5, cached_tokens: 0 };
        replies.send(Reply::Done { usage, timings: Timings::default() }).unwrap();
        let metrics = pump.tally.metrics.clone();
        pump.run().await;
        assert!(matches!(messages.recv().await, Some(Message::Dropped { .. })));
        assert!(matches!(messages.recv().await, Some(Message::Report { event: Event::Finished { .. }, .. })));
        drop(updates);
        let text = metrics.render(warmset_core::Instant::ZERO);
        assert!(text.contains("kind=\"completion\"} 5\n"), "work that was done is counted: {text}");
    }

    #[tokio::test]
    async fn too_much_behind_a_caller_cuts_it_at_once() {
        let (pump, replies, updates, mut messages) = pump(1, LONG);
        for _ in 0..REPLIES_BEHIND_MAX + 10 {
            replies.send(delta()).unwrap();
        }
        drop(replies);
        pump.run().await;
        assert!(matches!(messages.recv().await, Some(Message::Dropped { .. })));
        drop(updates);
    }
}
