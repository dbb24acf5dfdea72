//! How many blocks of KV are looked up in a second, with very many known: the whole event of a request, in which each block of its
//! prompt is found, counted as used and put where it belongs among those that can leave.
//!
//! `cargo run --release -p warmset-store --example kv_lookup -- [BLOCKS] [BLOCKS-OF-A-PROMPT] [REQUESTS]`

use serde_json::json;
use std::{
    error::Error,
    io::Write,
    time::{Duration, Instant as Clock},
};
use warmset_core::{
    Digest, Instant, Machine, RequestId,
    kv::{
        Action, BLOCK_TOKENS, BlockKey, DiskPlace, Event, FoundBlock, HEADER_BYTES, KvIdentity, Tier, TierSettings,
        TrustDomain, chain,
    },
};

/// As SmolLM2-135M has it.
const PAYLOAD_BYTES: u64 = 64 * 30 * 2 * 3 * 64 * 2;
const FOUND_AT_ONCE: usize = 10_000;

fn settings() -> TierSettings {
    TierSettings {
        host_bytes_max: 1 << 30,
        disk_bytes_max: 1 << 50,
        disk_slack_bytes: 0,
        disk_write_bytes_per_day: 0,
        disk_queue_bytes_max: 0,
        saves_max: 1,
        saves_waiting_max: 1,
    }
}

/// A key as good as a hash: its bits look random.
fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 32];
    let mut state = number;
    for piece in bytes.chunks_exact_mut(8) {
        state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(0x9e37_79b9_7f4a_7c15);
        piece.copy_from_slice(&(state ^ (state >> 31)).to_le_bytes());
    }
    BlockKey(bytes)
}

fn found(number: u64, prompt_blocks: u64, identity: KvIdentity) -> FoundBlock {
    let depth = number % prompt_blocks;
    FoundBlock {
        identity,
        domain: TrustDomain::named("one"),
        key: key(number),
        parent: key(number.wrapping_sub(1)),
        depth: depth as u32,
        payload_bytes: PAYLOAD_BYTES,
        place: DiskPlace { segment: (number >> 10) as u32, page: (number & 1023) as u32, pages: 361 },
    }
}

/// Seconds of computing the keys of so many blocks, which engines do.
fn hashing_seconds(identity: &KvIdentity, blocks: u32) -> f64 {
    let tokens: Vec<u32> = (0..blocks * BLOCK_TOKENS).collect();
    let began = Clock::now();
    std::hint::black_box(chain(identity, &TrustDomain::named("one"), &tokens));
    began.elapsed().as_secs_f64()
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut given = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let mut next = |otherwise| given.next().unwrap_or(Ok(otherwise));
    let (blocks, prompt_blocks, requests) = (next(1_000_000)?, next(64)?, next(20_000)?);
    let identity = KvIdentity::new(&Digest([1; 32]), "layout", "build");
    let (mut tier, mut actions) = (Tier::new(settings()), Vec::new());
    let slot_bytes = PAYLOAD_BYTES + HEADER_BYTES as u64;
    let opened = Event::Opened { model: Digest([1; 32]), identity, payload_bytes: PAYLOAD_BYTES, slot_bytes };
    tier.handle(Instant::ZERO, opened, &mut actions);
    let numbers: Vec<u64> = (0..blocks / prompt_blocks * prompt_blocks).collect();
    for part in numbers.chunks(FOUND_AT_ONCE) {
        let blocks = part.iter().map(|number| found(*number, prompt_blocks, identity)).collect();
        tier.handle(Instant::ZERO, Event::Found { blocks, others_bytes: 0 }, &mut actions);
    }
    let prompts = numbers.len() as u64 / prompt_blocks;
    let (mut seconds, mut looked_up) = (0.0, 0);
    for request in 0..requests {
        // Far apart, so that hardly anything of it is in a cache of the processor.
        let first = request.wrapping_mul(0x9e37_79b9_7f4a_7c15) % prompts * prompt_blocks;
        let keys: Vec<BlockKey> = (first..first + prompt_blocks).map(key).collect();
        let tokens = prompt_blocks as u32 * BLOCK_TOKENS;
        // Its engine holds all of it: nothing is read, everything is looked up.
        let request = RequestId(request);
        let asked = Event::Asked { request, identity, keys, prompt_tokens: tokens + 1, device_tokens: tokens };
        let now = Instant::after(Duration::from_millis(request.0 + 1));
        actions.clear();
        let began = Clock::now();
        tier.handle(now, asked, &mut actions);
        tier.handle(now, Event::Ended { request }, &mut actions);
        seconds += began.elapsed().as_secs_f64();
        let Some(Action::Grant { known, .. }) = actions.first() else { return Err("no grant".into()) };
        looked_up += u64::from(*known);
    }
    assert_eq!(looked_up, requests * prompt_blocks, "every block is known");
    let report = json!({
        "blocks_known": numbers.len(),
        "blocks_of_a_prompt": prompt_blocks,
        "blocks_per_second": (looked_up as f64 / seconds).round(),
        "keys_per_second": (f64::from(1 << 16) / hashing_seconds(&identity, 1 << 16)).round(),
    });
    writeln!(std::io::stdout(), "{report}")?;
    Ok(())
}
