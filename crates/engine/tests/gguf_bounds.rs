//! Hostile headers cost little: memory is counted by the allocator, work by the bytes that were read.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    io::Read,
};
use warmset_engine::gguf::{GgufError, read_header};

const MEMORY_MAX: usize = 1 << 20;
const READ_MAX: usize = 256 << 10;

thread_local! {
    static LIVE: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: every call is handed to the system's allocator unchanged; counting touches only thread-local cells that
// need no allocation and no destructor.
#[expect(unsafe_code, reason = "an allocator that counts can only be written this way")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.with(|live| {
            live.set(live.get().wrapping_add(layout.size()));
            live.get()
        });
        PEAK.with(|peak| peak.set(peak.get().max(live)));
        // SAFETY: the caller keeps the contract of `alloc`, which is the same here.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.with(|live| live.set(live.get().wrapping_sub(layout.size())));
        // SAFETY: the pointer came from `System.alloc` with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The given bytes, then as many zeros as anybody asks for.
struct Endless<'a> {
    first: &'a [u8],
    read: usize,
}

impl Read for Endless<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        let copied = self.first.len().min(into.len());
        into[..copied].copy_from_slice(&self.first[..copied]);
        self.first = &self.first[copied..];
        into[copied..].fill(0);
        self.read += into.len();
        Ok(into.len())
    }
}

fn header(tensors: u64, keys: u64) -> Vec<u8> {
    [&b"GGUF"[..], &3u32.to_le_bytes(), &tensors.to_le_bytes(), &keys.to_le_bytes()].concat()
}

fn key(name: &str, value_type: u32, value: &[u8]) -> Vec<u8> {
    [&(name.len() as u64).to_le_bytes()[..], name.as_bytes(), &value_type.to_le_bytes(), value].concat()
}

fn array(element_type: u32, elements: u64) -> Vec<u8> {
    [&element_type.to_le_bytes()[..], &elements.to_le_bytes()].concat()
}

fn hostile() -> Vec<(&'static str, Vec<u8>)> {
    let one_key = |value: Vec<u8>| [header(1, 1), value].concat();
    vec![
        ("tensor count", header(1 << 63, 0)),
        ("metadata count", header(0, 1 << 63)),
        ("array length", one_key(key("tokenizer.ggml.tokens", 9, &array(8, 1 << 63)))),
        ("large array", one_key(key("a.attention.head_count", 9, &array(4, 1 << 33)))),
        ("string length", one_key(key("general.architecture", 8, &(1u64 << 40).to_le_bytes()))),
        ("template length", one_key(key("tokenizer.chat_template", 8, &(1u64 << 30).to_le_bytes()))),
        ("key length", [header(0, 1), u64::MAX.to_le_bytes().to_vec()].concat()),
        ("value type", one_key(key("general.architecture", 99, &[]))),
        ("alignment", one_key(key("general.alignment", 4, &(1u32 << 31).to_le_bytes()))),
        ("empty keys", header(0, 4096)),
        ("no architecture", header(1 << 15, 0)),
    ]
}

#[test]
fn hostile_headers_take_little_memory_and_little_reading() {
    for (name, bytes) in hostile() {
        let mut source = Endless { first: &bytes, read: 0 };
        let before = LIVE.with(Cell::get);
        PEAK.with(|peak| peak.set(before));
        // The file claims to be a terabyte long, so that no length is refused for being beyond its end.
        let result = read_header(&mut source, 1 << 40);
        let used = PEAK.with(Cell::get) - before;
        assert!(matches!(&result, Err(error) if error.is_permanent()), "{name}: {result:?}");
        assert!(!matches!(result, Err(GgufError::Read { .. })), "{name}");
        assert!(used < MEMORY_MAX, "{name} took {used} bytes");
        assert!(source.read <= READ_MAX, "{name} read {} bytes", source.read);
    }
}
