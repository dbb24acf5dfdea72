//! The port from the gateway to a worker. In one process it is a channel; a remote worker implements the same trait.

use tokio::sync::mpsc::UnboundedSender;
use warmset_core::{
    Digest, Priority, RequestId, TenantId,
    inference::{Reply, Work},
    worker::CancelCause,
};

/// One request on its way to a worker.
#[derive(Debug)]
pub struct Assignment {
    /// Its identity within this run of the gateway.
    pub request: RequestId,
    /// The model it was admitted for.
    pub digest: Digest,
    /// Who asks.
    pub tenant: TenantId,
    /// Its class.
    pub class: Priority,
    /// What to do.
    pub work: Work,
    /// Where answers go, in order. After the last one (`Done`, `Embedded`, `Failed` or `Rejected`) the worker drops
    /// its end; an end dropped earlier means that the worker lost the request.
    pub replies: UnboundedSender<Reply>,
}

/// A worker as the gateway reaches it. No method blocks: what cannot be delivered shows as dropped `replies`.
pub trait WorkerLink: Send + Sync + 'static {
    /// Hands over a request.
    fn dispatch(&self, assignment: Assignment);

    /// Nobody waits for this request any more. The worker ends it and still closes its `replies`, with or without a
    /// last answer: only then does the gateway count its slot as free.
    fn cancel(&self, request: RequestId, cause: CancelCause);

    /// Asks the worker to load a model without a request.
    fn prewarm(&self, digest: Digest);
}
