//! Blocks of KV that go from one engine process to the next through memory that both share with the worker.

use crate::support::{World, job};
use rustix::fs::MemfdFlags;
use std::{
    fs::File,
    os::{fd::AsFd, unix::fs::FileExt},
};
use warmset_core::{
    Digest,
    kv::{BLOCK_TOKENS, BlockHeader, HEADER_BYTES, KvIdentity, TrustDomain, header::payload_checksum},
};
use warmset_engine::{
    kv::State,
    process::EngineProcess,
    protocol::{
        FailureKind, FromEngine, GenerateJob, KvGrant, KvOpen, LoadedInfo, SaveWanted, StateLayout, SyntheticSpec,
        ToEngine, Usage,
    },
};

struct Memory {
    arena: File,
    staging: File,
    open: KvOpen,
    layout: StateLayout,
}

impl Memory {
    fn new(info: &LoadedInfo) -> Self {
        let layout = info.kv.clone().unwrap();
        let file = |bytes: u64| {
            let file = File::from(rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(bytes).unwrap();
            file
        };
        let identity = KvIdentity::new(&Digest([3; 32]), &layout.description, "test");
        let slot_bytes = HEADER_BYTES as u64 + layout.state.block_bytes();
        let staging_bytes = layout.state.state_bytes(1024);
        let open = KvOpen { identity, slot_bytes, slots: 8, staging_bytes, verify: false };
        Self { arena: file(8 * slot_bytes), staging: file(staging_bytes), open, layout: layout.state }
    }

    fn give_to(&self, process: &EngineProcess) {
        process.send_descriptors(&[self.arena.as_fd(), self.staging.as_fd()]).unwrap();
        process.send(ToEngine::KvOpen(self.open));
    }

    /// Puts the saved blocks into slots, in order.
    fn publish(&self, wanted: &SaveWanted, bytes: u64) {
        let mut blob = vec![0; bytes as usize];
        self.staging.read_exact_at(&mut blob, 0).unwrap();
        let state = State::parse(&self.layout, &blob).unwrap();
        let mut parent = wanted.parent;
        for (block, key) in (wanted.first_block..).zip(&wanted.keys) {
            let payload: Vec<u8> = state.block(block).unwrap().flatten().copied().collect();
            let first = (block * BLOCK_TOKENS) as usize;
            let header = BlockHeader {
                identity: self.open.identity,
                domain: wanted.domain,
                key: *key,
                parent,
                first_token: first as u64,
                tokens: wanted.tokens[first..first + BLOCK_TOKENS as usize].to_vec(),
                payload_bytes: payload.len() as u64,
                payload_checksum: payload_checksum(&payload),
                written_at_seconds: 0,
            };
            parent = *key;
            let (mut page, at) = ([0; HEADER_BYTES], u64::from(block) * self.open.slot_bytes);
            header.encode(&mut page);
            self.arena.write_all_at(&page, at).unwrap();
            self.arena.write_all_at(&payload, at + HEADER_BYTES as u64).unwrap();
        }
    }
}

fn prompt() -> GenerateJob {
    let words: String = (0..200).map(|word| format!("w{word} ")).collect();
    GenerateJob { kv_domain: Some(TrustDomain::named("one")), ..job(&words, 4) }
}

/// Runs the job in a process that is given these blocks; everything it says.
async fn run(process: &mut EngineProcess, slots: Vec<u32>) -> Vec<FromEngine> {
    process.send(ToEngine::Generate { request: 1, job: Box::new(prompt()) });
    let source =
        if slots.is_empty() { KvGrant::Recompute { known: 0 } } else { KvGrant::Blocks { first: 0, known: 0, slots } };
    process.send(ToEngine::Grant { request: 1, source });
    let mut all = Vec::new();
    while let Some(message) = process.receive().await.unwrap() {
        let last = matches!(message, FromEngine::Done { .. } | FromEngine::Failed { .. });
        all.push(message);
        if last {
            break;
        }
    }
    all
}

fn usage(messages: &[FromEngine]) -> Usage {
    match messages.last() {
        Some(FromEngine::Done { usage, .. }) => *usage,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_one_process_saved_another_one_restores() {
    let world = World::new();
    let spec = SyntheticSpec { kv_bytes_per_token: 100, ..SyntheticSpec::default() };
    let mut process = world.spawned().await;
    process.send(ToEngine::Load(crate::support::load_request(world.model(&spec))));
    let info = world.until_loaded(&mut process).await;
    let memory = Memory::new(&info);
    memory.give_to(&process);
    let said = run(&mut process, Vec::new()).await;
    assert_eq!(usage(&said).cached_tokens, 0);
    let wanted = said.iter().find_map(|message| match message {
        FromEngine::SaveWanted(wanted) => Some(wanted.clone()),
        _ => None,
    });
    let wanted = wanted.expect("three blocks are new");
    assert_eq!((wanted.first_block, wanted.keys.len(), wanted.cells), (0, 3, 203));
    process.send(ToEngine::SaveGo { save: wanted.save });
    let Some(FromEngine::Saved { save, bytes }) = process.receive().await.unwrap() else { panic!("no answer") };
    assert_eq!(save, wanted.save);
    memory.publish(&wanted, bytes);
    process.send(ToEngine::SaveEnd { save });
    process.kill();
    process.exited().await;

    let mut other = world.loaded(&spec).await;
    memory.give_to(&other);
    let said = run(&mut other, vec![0, 1, 2]).await;
    assert!(
        said.iter().any(|message| matches!(message, FromEngine::Restored { request: 1, blocks: 3, .. })),
        "{said:?}"
    );
    assert_eq!(usage(&said).cached_tokens, 192);
    // The next time it lies there, with what is behind the last whole block; the last token is always computed.
    // All but its last two.
    assert_eq!(usage(&run(&mut other, Vec::new()).await).cached_tokens, 198);

    // A block whose payload is damaged: what the worker's checksum is for.
    let at = memory.open.slot_bytes + HEADER_BYTES as u64 + 5;
    memory.arena.write_all_at(b"?", at).unwrap();
    let mut third = world.loaded(&spec).await;
    memory.give_to(&third);
    let said = run(&mut third, vec![0, 1, 2]).await;
    let Some(FromEngine::Failed { kind: FailureKind::Internal, message, .. }) = said.last() else { panic!("{said:?}") };
    assert!(message.contains("wrong KV"), "{message}");
    assert!(said.iter().any(|message| matches!(message, FromEngine::Restored { blocks: 0, .. })), "{said:?}");
}

#[tokio::test]
async fn memory_that_is_not_what_was_said_is_not_used() {
    let world = World::new();
    let spec = SyntheticSpec { kv_bytes_per_token: 100, ..SyntheticSpec::default() };
    let mut process = world.spawned().await;
    process.send(ToEngine::Load(crate::support::load_request(world.model(&spec))));
    let info = world.until_loaded(&mut process).await;
    let memory = Memory::new(&info);
    // No descriptors at all, then too small ones.
    process.send(ToEngine::KvOpen(memory.open));
    memory.arena.set_len(10).unwrap();
    memory.give_to(&process);
    let said = run(&mut process, vec![0]).await;
    assert!(matches!(&said[0], FromEngine::Prepared { keys, .. } if keys.is_empty()), "{said:?}");
    assert!(said.iter().any(|message| matches!(message, FromEngine::Restored { blocks: 0, .. })), "{said:?}");
    assert_eq!(usage(&said).cached_tokens, 0);
}
