//! Stores objects with foyer, makes them durable, and loads them again: `blocks-bench DIRECTORY psync|uring OBJECTS BYTES CONCURRENCY`.
//!
//! Its memory is kept too small for an object, so that every load comes from the disk; the page cache is avoided on both ways.
//! The queue is made long enough for all objects: with the default one half of a burst would be dropped.

use foyer::{
    BlockEngineConfig, DeviceBuilder, FsDeviceBuilder, HybridCache, HybridCacheBuilder, HybridCachePolicy,
    IoEngineConfig, PsyncIoEngineConfig, UringIoEngineConfig,
};
use std::{fs::File, path::Path, sync::Arc, time::Instant};

fn object(number: u64, bytes: usize) -> Vec<u8> {
    let mut state = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut object = Vec::with_capacity(bytes);
    while object.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        object.extend_from_slice(&state.to_le_bytes());
    }
    object
}

/// foyer syncs nothing by itself.
fn make_durable(directory: &Path) {
    for entry in directory.read_dir().unwrap().flatten().filter(|entry| entry.path().is_file()) {
        File::open(entry.path()).unwrap().sync_data().unwrap();
    }
    File::open(directory).unwrap().sync_all().unwrap();
}

async fn open(directory: &Path, io: &str, capacity_bytes: usize) -> HybridCache<u64, Vec<u8>> {
    let device = FsDeviceBuilder::new(directory).with_capacity(capacity_bytes).with_direct(true).build().unwrap();
    let engine: Box<dyn IoEngineConfig> = match io {
        "uring" => UringIoEngineConfig::new().boxed(),
        _ => PsyncIoEngineConfig::new().boxed(),
    };
    let config = BlockEngineConfig::new(device)
        .with_flushers(2)
        .with_buffer_pool_size(1 << 30)
        .with_submit_queue_size_threshold(2 << 30);
    HybridCacheBuilder::new()
        .with_policy(HybridCachePolicy::WriteOnInsertion)
        .memory(1)
        .with_shards(1)
        .with_weighter(|_, value: &Vec<u8>| value.len())
        .storage()
        .with_io_engine_config(engine)
        .with_engine_config(config)
        .build()
        .await
        .unwrap()
}

#[tokio::main]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [directory, io, objects, bytes, concurrency] = &arguments[..] else { panic!("five arguments") };
    let directory = Path::new(directory);
    let number = |text: &String| text.parse::<usize>().unwrap();
    let (objects, bytes, concurrency) = (number(objects), number(bytes), number(concurrency));
    let capacity_bytes = (objects * bytes * 2).next_multiple_of(16 << 20) + (256 << 20);
    let cache = open(directory, io, capacity_bytes).await;
    let values: Vec<Vec<u8>> = (0..objects as u64).map(|number| object(number, bytes)).collect();
    let first_bytes: Vec<[u8; 16]> = values.iter().map(|value| value[bytes - 16..].try_into().unwrap()).collect();

    let started = Instant::now();
    for (number, value) in values.into_iter().enumerate() {
        cache.insert(number as u64, value);
    }
    cache.storage().wait().await;
    make_durable(directory);
    let store_seconds = started.elapsed().as_secs_f64();

    let permits = Arc::new(tokio::sync::Semaphore::new(concurrency));
    let started = Instant::now();
    let mut loads = Vec::new();
    for number in 0..objects as u64 {
        let (cache, permits) = (cache.clone(), Arc::clone(&permits));
        loads.push(tokio::spawn(async move {
            let _permit = permits.acquire_owned().await.unwrap();
            let entry = cache.get(&number).await.unwrap();
            entry.map(|entry| <[u8; 16]>::try_from(&entry.value()[entry.value().len() - 16..]).unwrap())
        }));
    }
    let mut hits = 0;
    for (load, expected) in loads.into_iter().zip(first_bytes) {
        if let Some(end) = load.await.unwrap() {
            assert_eq!(end, expected);
            hits += 1;
        }
    }
    let load_seconds = started.elapsed().as_secs_f64();
    let total = (objects * bytes) as f64;
    println!(
        "{}",
        serde_json::json!({
            "store_bytes_per_second": total / store_seconds,
            "load_bytes_per_second": (hits * bytes) as f64 / load_seconds,
            "objects": objects,
            "hits": hits,
        })
    );
    cache.close().await.unwrap();
}
