//! Streams for a name that is changing its meaning: nobody knows yet which version answers, but their callers hear that
//! they wait. The head of such a stream names no digest; its chunks do.

use super::{
    Api, Ask, Dialect,
    ask::Generation,
    call::{Answers, Call},
    class_of, encoder, event_stream_head, resolve,
    stream::{BrokenStream, EventStream},
    submit,
};
use axum::{body::Body, http::HeaderMap, response::Response};
use bytes::Bytes;
use futures_util::{
    Stream, StreamExt,
    future::BoxFuture,
    stream::{self, BoxStream},
};
use tokio::time::{Instant, Interval, MissedTickBehavior};

const COMMENT: &[u8] = b": waiting for another version\n\n";

type Events = BoxStream<'static, Result<Bytes, BrokenStream>>;

/// What a stream is doing.
enum Phase {
    /// Its name leads nowhere yet.
    Waiting(BoxFuture<'static, Events>, Interval),
    Answering(Events),
}

/// A stream that begins now, whenever its answer does.
pub(super) fn respond(api: &Api, call: Call, dialect: Dialect, asked: Generation, headers: HeaderMap) -> Response {
    let mut response = event_stream_head();
    call.write_headers(response.headers_mut());
    let mut heartbeat = tokio::time::interval_at(Instant::now(), api.config.heartbeat_interval);
    heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let events = answer(api.clone(), call, dialect, asked, headers);
    *response.body_mut() = Body::from_stream(run(Phase::Waiting(Box::pin(events), heartbeat)));
    response
}

fn run(phase: Phase) -> impl Stream<Item = Result<Bytes, BrokenStream>> + Send {
    stream::unfold(phase, async |mut phase| {
        loop {
            match &mut phase {
                Phase::Answering(events) => return events.next().await.map(|item| (item, phase)),
                Phase::Waiting(answer, heartbeat) => {
                    let events = tokio::select! {
                        events = answer => events,
                        _ = heartbeat.tick() => return Some((Ok(Bytes::from_static(COMMENT)), phase)),
                    };
                    phase = Phase::Answering(events);
                }
            }
        }
    })
}

/// The events of the answer, once the name has its meaning.
async fn answer(api: Api, mut call: Call, dialect: Dialect, mut asked: Generation, headers: HeaderMap) -> Events {
    let resolved = resolve(&api, &mut call, &asked.model, &headers).await;
    let entry = resolved.as_ref().ok().cloned();
    let answers = match &entry {
        Some(entry) => {
            let class = class_of(&call, entry, asked.tier);
            let work = Ask { jobs: std::mem::take(&mut asked.jobs), class, headers: &headers, counted: true };
            submit(&api, &call, entry, work)
        }
        None => Answers::new(Vec::new(), None),
    };
    let (requests, choices, encoder) =
        (answers.len(), asked.choices, encoder(dialect, &mut asked, entry.as_deref(), &call));
    let pace = (api.config.heartbeat_interval, true);
    let mut events = EventStream::new(answers, call, encoder, (requests, choices), pace);
    if let Err(error) = &resolved {
        events.begin_with(error);
    }
    events.into_stream().boxed()
}
