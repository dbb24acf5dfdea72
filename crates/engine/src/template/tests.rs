//! Templates as they are in use, and templates made to hurt.

use super::*;
use crate::protocol::{Function, ToolChoice};

const SMOLLM: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ \
    '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}\
    {% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// In the manner of Gemma's and Llama's: blocks on lines of their own, methods, macros, refusals, parts.
const ELABORATE: &str = "{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set first = messages[0].content.strip() ~ '\\n\\n' %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set first = '' %}
    {%- set rest = messages %}
{%- endif %}
{%- macro part_text(parts) %}{% for part in parts %}{{ part['text'] | trim }}{% endfor %}{% endmacro %}
{%- for message in rest %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif %}
    {%- set role = 'model' if message.role == 'assistant' else message.role %}
    {{- '<start_of_turn>' + role + '\\n' + (first if loop.first else '') }}
    {%- if message['content'] is string %}{{ message['content'].strip() }}
    {%- else %}{{ part_text(message['content']) }}
    {%- endif %}
    {{- '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";

fn render(source: &str, messages: &str) -> Result<String, TemplateError> {
    ChatTemplate::new(source, "<s>", "</s>")?.render(messages)
}

fn one(content: &str) -> String {
    serde_json::json!([{ "role": "user", "content": content }]).to_string()
}

#[test]
fn real_templates_render_as_transformers_does() {
    assert_eq!(
        render(SMOLLM, &one("Hi")).unwrap(),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let conversation = r#"[{"role":"system","content":" Be brief. "},{"role":"user","content":[{"type":"text","text":" A "},
        {"type":"text","text":"B"}]},{"role":"assistant","content":"C","name":"x"},{"role":"user","content":"D"}]"#;
    assert_eq!(
        render(ELABORATE, conversation).unwrap(),
        "<s><start_of_turn>user\nBe brief.\n\nAB<end_of_turn>\n<start_of_turn>model\nC<end_of_turn>\n\
         <start_of_turn>user\nD<end_of_turn>\n<start_of_turn>model\n"
    );
    assert_eq!(
        render(CHATML, &one("Hi")).unwrap(),
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "the fallback"
    );
}

#[test]
fn blocks_leave_no_blank_lines() {
    let source = "{% if true %}\n  {% set x = 1 %}\nline\n  {% endif %}\n{{ eos_token }}\n";
    assert_eq!(render(source, &one("")).unwrap(), "line\n</s>");
}

#[test]
fn parts_become_text_where_the_template_adds_strings() {
    let parts = r#"[{"role":"user","content":[{"type":"text","text":"one"},{"type":"text","text":"two"}]}]"#;
    assert_eq!(render("{{ messages[0]['content'] + '!' }}", parts).unwrap(), "one\ntwo!");
    assert_eq!(render("{{ messages[0]['content'] }}", parts).unwrap(), "one\ntwo", "never a list as it is in memory");
    let image = r#"[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://x"}}]}]"#;
    assert!(matches!(render(CHATML, image), Err(TemplateError::Messages(words)) if words.contains("image_url")));
    let nothing = r#"[{"role":"assistant","content":null},{"role":"user"}]"#;
    assert_eq!(render("{% for m in messages %}[{{ m.content }}]{% endfor %}", nothing).unwrap(), "[][]");
}

#[test]
fn broken_messages_are_the_callers_fault() {
    for bad in ["", "{}", "[]", "[1]", r#"[{"content":"x"}]"#, r#"[{"role":"user","content":7}]"#] {
        assert!(matches!(render(CHATML, bad), Err(TemplateError::Messages(_))), "{bad}");
    }
    let many = serde_json::json!(vec![serde_json::json!({ "role": "user", "content": "" }); MESSAGES_MAX + 1]);
    assert!(matches!(render("x", &many.to_string()), Err(TemplateError::Messages(_))));
}

#[test]
fn refusals_are_told_from_mistakes() {
    let odd = r#"[{"role":"assistant","content":"x"}]"#;
    let refusal = TemplateError::Refused("Conversation roles must alternate user/assistant".into());
    assert_eq!(render(ELABORATE, odd), Err(refusal));
    assert!(matches!(render("{{ messages.nothing.at_all }}", &one("")), Err(TemplateError::Failed(_))));
    assert!(matches!(render("{% if %}", &one("")), Err(TemplateError::Invalid(_))));
    assert!(matches!(
        render("{% include 'other' %}", &one("")),
        Err(TemplateError::Failed(_) | TemplateError::Invalid(_))
    ));
    let long = "x".repeat(TEMPLATE_BYTES_MAX + 1);
    assert!(matches!(ChatTemplate::new(&long, "", ""), Err(TemplateError::Invalid(_))));
}

#[test]
fn json_is_written_as_python_writes_it() {
    let message = r#"[{"role":"user","content":"","tool":{"a":[1,2.5,null,true],"b":"<é'>"}}]"#;
    assert_eq!(
        render("{{ messages[0].tool | tojson }}", message).unwrap(),
        r#"{"a": [1, 2.5, null, true], "b": "<é'>"}"#
    );
    assert_eq!(
        render("{{ messages[0].tool.a | tojson(indent=2) }}", message).unwrap(),
        "[\n  1,\n  2.5,\n  null,\n  true\n]"
    );
    assert_eq!(render("{{ 'ä' | tojson(ensure_ascii=False) }}", message).unwrap(), "\"ä\"");
}

#[test]
fn dates_follow_the_calendar() {
    let at = |format, seconds| functions::strftime(format, seconds).unwrap();
    assert_eq!(at("%d %b %Y", 0), "01 Jan 1970");
    assert_eq!(at("%A %Y-%m-%d %H:%M:%S", 951_782_400), "Tuesday 2000-02-29 00:00:00");
    assert_eq!(at("%B %-d, %Y %I:%M %p", 4_107_542_399), "February 28, 2100 11:59 PM");
    assert_eq!(at("%F %T 100%%", 1_700_000_000), "2023-11-14 22:13:20 100%");
    assert_eq!(functions::strftime("%Q", 0), None);
    assert_eq!(functions::strftime("%", 0), None);
    assert!(render("{{ strftime_now('%Y') }}", &one("")).unwrap().starts_with("20"));
}

/// Loops and data bombs that would run for hours or fill memory.
const HOSTILE: [&str; 8] = [
    "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ a * b }}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ 'x' * 99999999 }}",
    "{{ ('x' * 99999) | replace('x', 'y' * 9999) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ ([1] * 90000000) | join(',') }}",
    "{{ messages | map(attribute='content') | list | tojson * 99999999 }}",
];

#[test]
fn hostile_templates_are_accepted_and_then_give_up() {
    for source in HOSTILE {
        let template = ChatTemplate::new(source, "", "").unwrap();
        let result = template.render(&one("x"));
        assert!(
            matches!(result, Err(TemplateError::TooMuchWork | TemplateError::TooLong | TemplateError::Failed(_))),
            "{source}: {:?}",
            result.map(|text| text.len())
        );
        // It gives up the same way every time, and the next template works.
        assert!(template.render(&one("x")).is_err());
    }
    assert!(render(CHATML, &one("x")).is_ok());
}

#[test]
fn work_is_bounded_by_count_and_output_by_bytes() {
    let loops = |count: usize| {
        format!("{{% for a in range({count}) %}}{{% for b in range(1000) %}}{{% endfor %}}{{% endfor %}}")
    };
    assert!(render(&loops(50), &one("")).is_ok(), "ordinary work fits");
    assert_eq!(render(&loops(10_000), &one("")), Err(TemplateError::TooMuchWork));
    let big = one(&"x".repeat(OUTPUT_BYTES_MAX));
    let result = render("{{ messages[0].content }}y", &big);
    assert!(
        matches!(result, Err(TemplateError::TooLong | TemplateError::TooMuchWork)),
        "{:?}",
        result.map(|text| text.len())
    );
    let long = one(&"word ".repeat(200_000));
    assert_eq!(render(SMOLLM, &long).unwrap().len(), 1_000_000 + render(SMOLLM, &one("")).unwrap().len());
    let many = serde_json::json!(vec![serde_json::json!({ "role": "user", "content": "hello" }); 2000]);
    assert!(render(SMOLLM, &many.to_string()).is_ok(), "two thousand messages fit");
}

fn weather() -> Tools {
    let parameters = r#"{"type": "object", "properties": {"city": {"type": "string"}}}"#.into();
    let function = Function { name: "weather".into(), description: Some("Looks.".into()), parameters, strict: false };
    Tools { functions: vec![function], choice: ToolChoice::Auto, parallel: true }
}

const CALLED: &str = r#"[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rome?"},
    {"role": "assistant", "content": null, "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Rome\"}"}}]},
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"}]"#;

#[test]
fn a_template_without_functions_gets_them_as_text() {
    let template = ChatTemplate::new(CHATML, "", "").unwrap();
    let text = template.render_with_tools(CALLED, Some(&weather())).unwrap();
    assert!(text.starts_with("<|im_start|>system\nBe brief.\n\n# Tools"), "{text}");
    let described = "<tools>\n{\"type\": \"function\", \"function\": {\"name\": \"weather\", \"description\": \"Looks.\", \
                     \"parameters\": {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}}}}}\n</tools>";
    assert!(text.contains(described), "{text}");
    let call = "<|im_start|>assistant\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>\
                <|im_end|>\n";
    assert!(text.contains(call), "{text}");
    assert!(text.contains("<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>"), "{text}");
    let without = template.render(&one("Hi")).unwrap();
    assert!(!without.contains("# Tools"));
    let none = Tools { choice: ToolChoice::None, ..weather() };
    assert!(!template.render_with_tools(&one("Hi"), Some(&none)).unwrap().contains("weather"));
    let begun = template.render_with_tools(&one("Hi"), Some(&weather())).unwrap();
    assert!(begun.starts_with("<|im_start|>system\n# Tools"), "{begun}");
}

#[test]
fn a_template_with_functions_renders_them_itself() {
    let source = "{% for t in tools %}{{ t | tojson }}{% endfor %}|{% for m in messages %}{{ m.role }}\
                  {% for c in m.tool_calls %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}";
    let template = ChatTemplate::new(source, "", "").unwrap();
    let text = template.render_with_tools(CALLED, Some(&weather())).unwrap();
    assert!(text.starts_with("{\"type\": \"function\""), "{text}");
    assert!(text.ends_with("|system;user;assistant<tool_call>{\"city\": \"Rome\"};tool;"), "{text}");
    assert_eq!(template.render(&one("x")).unwrap(), "|user;");
    let bad = r#"[{"role": "assistant", "tool_calls": "x"}]"#;
    assert!(matches!(template.render(bad), Err(TemplateError::Messages(_))));
}
