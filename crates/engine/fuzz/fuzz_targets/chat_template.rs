//! Any text as a chat template: compiled and rendered, refused or given up, in bounded time.

#![no_main]

use libfuzzer_sys::fuzz_target;
use warmset_engine::template::ChatTemplate;

const MESSAGES: &str = r#"[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"u"}]}]"#;

fuzz_target!(|source: &str| {
    if let Ok(template) = ChatTemplate::new(source, "<s>", "</s>") {
        let _ = template.render(MESSAGES);
    }
});
