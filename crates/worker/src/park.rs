//! Requests that leave an engine in the middle: their memory, which is the server's, and what a life says of them.

use crate::{
    handle::Command,
    life::{Life, Order},
    requests::{Task, Waiting},
};
use std::io;
use tokio::sync::mpsc::UnboundedSender;
use warmset_core::{
    Bytes, RequestId,
    inference::Reply,
    worker::{Event, Rejection},
};
use warmset_engine::{process::EngineProcess, protocol::ToEngine};
use warmset_store::arena::Staging;

/// Shows in the system's lists of mappings, so that it is told from an engine's own memory.
const MEMORY_NAME: &str = "warmset-kv-parked";

/// Memory for one request. It is read by engines only; nothing in it means anything to the server.
pub(crate) struct ParkedMemory {
    file: Staging,
    bytes: Bytes,
}

impl ParkedMemory {
    /// Takes the memory here, so that it does not count as an engine's.
    fn take(bytes: Bytes) -> io::Result<Self> {
        let file = Staging::create(MEMORY_NAME, bytes)?;
        file.allocate(bytes)?;
        Ok(Self { file, bytes })
    }
}

/// A request that has left its engine.
pub(crate) struct Parked {
    memory: ParkedMemory,
    pub(crate) output_started: bool,
}

/// Takes memory, on a thread that may block, and tells the life of the engine that is to fill it.
pub(crate) fn give_memory(request: RequestId, bytes: Bytes, orders: UnboundedSender<Order>) {
    tokio::task::spawn_blocking(move || {
        // A life that is over has its end on the way to the loop.
        let _ = orders.send(Order::ParkInto { request, parked: ParkedMemory::take(bytes) });
    });
}

impl Life {
    /// There is memory for a request that was stopped, or there is none and it runs on.
    pub(crate) fn park_into(&mut self, request: RequestId, memory: io::Result<ParkedMemory>, process: &EngineProcess) {
        // It may have ended as it was stopped.
        let Some(caller) = self.callers.get_mut(&request) else { return };
        let given = memory.and_then(|memory| {
            process.send_descriptors(&[memory.file.descriptor()])?;
            Ok(memory)
        });
        match given {
            Ok(memory) => {
                process.send(ToEngine::ParkTake { request: request.0, bytes: memory.bytes });
                caller.parking = Some(memory);
            }
            Err(error) => {
                tracing::warn!(request = request.0, %error, "no memory to park a request in; it runs on");
                process.send(ToEngine::ParkStop { request: request.0 });
                self.report(Event::ParkRefused { request });
            }
        }
    }

    pub(crate) fn park_refused(&mut self, request: RequestId) {
        if let Some(caller) = self.callers.get_mut(&request) {
            caller.parking = None;
            self.report(Event::ParkRefused { request });
        }
    }

    /// The engine has let go of a request: its caller waits with the loop again.
    pub(crate) fn has_parked(&mut self, request: RequestId) {
        let Some(memory) = self.callers.get_mut(&request).and_then(|caller| caller.parking.take()) else { return };
        let Some(caller) = self.callers.remove(&request) else { return };
        if let Some(kv) = &mut self.kv {
            kv.end(request, None);
        }
        // A caller that is gone is cancelled by whoever finds out.
        let _ = caller.replies.send(Reply::Parked);
        let parked = Parked { memory, output_started: caller.output_started };
        self.tell(Command::Parked(request, Waiting { task: Task::GoOn(parked), replies: caller.replies }));
    }

    /// Gives a request that was parked to this engine.
    pub(crate) fn go_on(&mut self, request: RequestId, parked: &Parked, process: &EngineProcess) {
        let memory = &parked.memory;
        match process.send_descriptors(&[memory.file.descriptor()]) {
            Ok(()) => {
                if let Some(caller) = self.callers.get(&request) {
                    let _ = caller.replies.send(Reply::Resumed);
                }
                process.send(ToEngine::Resume { request: request.0, bytes: memory.bytes });
            }
            Err(error) => {
                let message = format!("it was parked and cannot go on: {error}");
                let rejection = Rejection::EngineLost { message, output_started: parked.output_started };
                self.answer_last(request, Reply::Rejected(rejection));
            }
        }
    }
}
