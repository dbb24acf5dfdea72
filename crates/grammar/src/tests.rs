//! Grammars against a vocabulary of single bytes: what a text may be is then seen byte by byte.

use super::*;
use proptest::prelude::*;
use warmset_core::inference::{Function, ToolChoice};

/// Bytes as tokens, and one token more that ends a text.
fn bytes() -> Vocabulary {
    let mut tokens: Vec<Vec<u8>> = (0..=254u8).map(|byte| vec![byte]).collect();
    // 0xff never occurs in a text and begins special tokens.
    tokens.push(Vec::new());
    tokens.push(Vec::new());
    Vocabulary::new(&tokens, &[256]).unwrap()
}

const END: usize = 256;

/// Whether a text can be generated, up to its end.
fn derives(vocabulary: &Vocabulary, grammar: &Grammar, text: &str) -> bool {
    let mut constraint = vocabulary.constrain(grammar).unwrap();
    for byte in text.bytes() {
        if constraint.look().is_err() || !constraint.allows(byte.into()) {
            return false;
        }
        constraint.take(byte.into()).unwrap();
    }
    constraint.is_complete() || (constraint.look().is_ok() && constraint.allows(END))
}

fn gbnf(grammar: &str) -> Result<Grammar, GrammarError> {
    format(&TextFormat::Gbnf { grammar: grammar.into() })
}

fn json_schema(schema: serde_json::Value) -> Result<Grammar, GrammarError> {
    format(&TextFormat::JsonSchema { schema: schema.to_string() })
}

fn assert_derives(grammar: &Grammar, good: &[&str], bad: &[&str]) {
    let vocabulary = bytes();
    for text in good {
        assert!(derives(&vocabulary, grammar, text), "{text:?} must be possible");
    }
    for text in bad {
        assert!(!derives(&vocabulary, grammar, text), "{text:?} must not be possible");
    }
}

#[test]
fn gbnf_means_what_it_says() {
    let simple = gbnf("root ::= \"yes\" | \"no\" # that is all\n").unwrap();
    assert_derives(&simple, &["yes", "no"], &["", "y", "yesno", "maybe"]);
    let counted = gbnf("root ::= [a-c]{2,3} \"-\"? digit+\ndigit ::= [0-9]\n").unwrap();
    assert_derives(&counted, &["ab1", "abc-12"], &["a1", "abcd1", "ab-", "ab--1"]);
    let greedy = gbnf("root ::= [a-z]* \"z\"").unwrap();
    assert_derives(&greedy, &["z", "abz", "zzz"], &["", "ab"]);
    let escaped = gbnf(r#"root ::= "\"\x41\u00e9\n" [^\]a-c] ."#).unwrap();
    assert_derives(&escaped, &["\"Aé\nxy", "\"Aé\nd\n"], &["\"Aé\na!", "\"Aé\n]!"]);
    let several = gbnf("root ::= (\n  \"a\" |\n  \"b\"\n)+ |\n \"c\"\n").unwrap();
    assert_derives(&several, &["ab", "c"], &["", "ac"]);
    let empty = gbnf("root ::= \"\" | \"x\"").unwrap();
    assert_derives(&empty, &["", "x"], &["xx"]);
}

#[test]
fn rules_that_come_back_to_themselves_are_exact() {
    let balanced = gbnf("root ::= \"(\" root \")\" root | \"\"").unwrap();
    assert_derives(&balanced, &["", "()", "(())()"], &["(", ")(", "(()"]);
    let overlapping = gbnf("root ::= item | \"[\" root \"]\"\nitem ::= [a-z]+ \"a\"").unwrap();
    assert_derives(&overlapping, &["ba", "[[aa]]"], &["a", "b", "[ab]"]);
    let left = gbnf("root ::= root \"+\" [0-9] | [0-9]").unwrap();
    assert_derives(&left, &["1", "1+2+3"], &["+", "1+"]);
}

#[test]
fn bad_grammars_are_refused_with_a_reason() {
    for (grammar, reason) in [
        ("", "no rule named root"),
        ("x ::= \"a\"", "no rule named root"),
        ("root ::= other", "other is used and not defined"),
        ("root ::= \"a", "ends too early"),
        ("root = \"a\"", "::= is expected"),
        ("root ::= (\"a\"", "ends too early"),
        ("root ::= [b-a]", "ends before it begins"),
        ("root ::= []", "no character"),
        ("root ::= \"a\"{3,2}", "less than its least"),
        ("root ::= \"a\"{100000}", "number from 0 to 2000"),
        ("root ::= \"\\q\"", "no escape"),
        ("root ::= \"\\UFFFFFFFF\"", "no such character"),
        ("root ::= <think>", "tokens cannot be named"),
        ("root ::= \"a\" )", "new line"),
        ("root ::= \"ok\"\nroot2 :: x", "line 2"),
    ] {
        let error = gbnf(grammar).unwrap_err().to_string();
        assert!(error.contains(reason), "{grammar:?}: {error}");
    }
    let nested = format!("root ::= {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000));
    assert!(gbnf(&nested).is_err());
    let nested = format!("root ::= {}\"a\"{}", "(".repeat(20_000), ")".repeat(20_000));
    assert!(gbnf(&nested).unwrap_err().to_string().contains("nested too deep"));
    let stars = format!("root ::= \"a\"{}", "*".repeat(10_000));
    assert!(gbnf(&stars).is_err());
    // Loops that derive nothing, and repetitions of repetitions, end one way or the other.
    let _ = gbnf("root ::= root");
    let _ = gbnf("root ::= a\na ::= b\nb ::= a | \"\"");
    let _ = gbnf("root ::= ((((\"a\"{2000}){2000}){2000}){2000}){2000}");
    let _ = gbnf("root ::= ((((\"a\"?)*)*)*)*");
}

#[test]
fn schemas_are_kept_to() {
    let person = json_schema(serde_json::json!({
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 9},
            "kind": {"enum": ["cat", "dog"]}},
        "required": ["name", "age"],
    }))
    .unwrap();
    assert_derives(
        &person,
        &["{\"name\": \"A\\\"b\", \"age\": 7}", "{\"name\": \"\", \"age\": 0, \"kind\": \"dog\"}"],
        &[
            "{}",
            "{\"age\": 7, \"name\": \"x\"}",
            "{\"name\": \"x\", \"age\": 10}",
            "{\"name\": \"x\", \"age\": 1, \"more\": 1}",
            "{ \"name\": \"x\", \"age\": 1}",
            "[]",
        ],
    );
    let list = json_schema(serde_json::json!({
        "$defs": {"point": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2}},
        "type": "object", "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
        "required": ["points"], "additionalProperties": false,
    }))
    .unwrap();
    assert_derives(&list, &["{\"points\": [[1, 2.5], [3, 4]]}"], &["{\"points\": [[1]]}"]);
    let object = format(&TextFormat::JsonObject).unwrap();
    assert_derives(&object, &["{}", "{\"a\": [1, {\"b\": null}]}"], &["[]", "1", "{\"a\"}"]);
}

#[test]
fn schemas_that_cannot_be_kept_are_refused() {
    let bad = |schema: serde_json::Value| json_schema(schema).unwrap_err().to_string();
    assert!(!bad(serde_json::json!({"type": "nonsense"})).is_empty());
    assert!(bad(serde_json::json!({"type": "object", "x-guidance": {}})).contains("x-guidance"));
    assert!(bad(serde_json::json!([])).contains("object"));
    let mut deep = serde_json::json!({"type": "string"});
    for _ in 0..SCHEMA_DEPTH_MAX {
        deep = serde_json::json!({"type": "array", "items": deep});
    }
    assert!(bad(deep).contains("deeper"));
    let long = serde_json::json!({"type": "string", "description": "x".repeat(SCHEMA_BYTES_MAX)});
    assert!(bad(long).contains("longer"));
    assert!(format(&TextFormat::JsonSchema { schema: "{".into() }).is_err());
}

#[test]
fn what_is_wrong_with_a_schema_is_said_in_its_own_words() {
    let bounds = "bounds must lie from -10^18 to 10^18";
    for (schema, words) in [
        (serde_json::json!({"$ref": "https://example.org/schema.json"}), "a $ref must begin with #/"),
        (serde_json::json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX}), bounds),
        (serde_json::json!({"type": "integer", "minimum": -1e300, "maximum": 1e300}), bounds),
        (serde_json::json!({"type": "number", "maximum": 1e100}), bounds),
        (serde_json::json!({"type": "integer", "multipleOf": 0}), "above 0"),
        (serde_json::json!({"type": "string", "pattern": "(ab"}), "unclosed group"),
        (serde_json::json!({"type": "object", "patternProperties": {"[z-a]": {}}}), "[z-a]"),
        (serde_json::json!({"type": "string", "pattern": "a\\bc"}), "looks around"),
        (serde_json::json!({"type": "string", "minLength": 1_000_000_000_000u64}), "a length in it"),
    ] {
        let error = json_schema(schema.clone()).unwrap_err().to_string();
        assert!(error.contains(words), "{schema}: {error}");
        for raw in ["attempt to", "NoExtension", "regex parse error", "panic", "feature"] {
            assert!(!error.contains(raw), "{schema}: {error}");
        }
    }
    for bound in [1_000_000_000_000_000_000i64, 0] {
        let schema = serde_json::json!({"type": "integer", "minimum": -bound, "maximum": bound});
        assert!(json_schema(schema).is_ok(), "{bound}");
    }
}

#[test]
fn what_can_never_end_is_said_to_have_no_end() {
    for grammar in [json_schema(serde_json::json!({"$ref": "#"})), gbnf("root ::= root")] {
        let mut constraint = bytes().constrain(&grammar.unwrap()).unwrap();
        let error = constraint.look().unwrap_err().to_string();
        assert!(error.contains("has no way to end"), "{error}");
    }
    let ends = serde_json::json!({"type": "object", "properties": {"a": {"$ref": "#"}}});
    assert_derives(&json_schema(ends).unwrap(), &["{}", "{\"a\": {}}"], &["{\"b\": 1}"]);
}

fn function(name: &str, parameters: serde_json::Value) -> Function {
    Function { name: name.into(), description: None, parameters: parameters.to_string(), strict: false }
}

fn weather(choice: ToolChoice, parallel: bool) -> Tools {
    let city = serde_json::json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    Tools { functions: vec![function("weather", city), function("stop", serde_json::json!({}))], choice, parallel }
}

const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}\n</tool_call>";

#[test]
fn calls_are_made_where_they_must_and_may_be() {
    let two = format!("{CALL}\n{CALL}");
    let other = "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>";
    let wrong = CALL.replace("Rome\"", "Rome\", \"x\": 1");
    let required = calls(&weather(ToolChoice::Required, true)).unwrap();
    assert_derives(&required, &[CALL, &two, other], &["", "Hello", &wrong]);
    let single = calls(&weather(ToolChoice::Required, false)).unwrap();
    assert_derives(&single, &[CALL], &[&two]);
    let named = calls(&weather(ToolChoice::Function { name: "stop".into() }, true)).unwrap();
    assert_derives(&named, &[other], &[CALL]);
    let auto = calls(&weather(ToolChoice::Auto, true)).unwrap();
    let spoken = format!("Let me see.\n{CALL}");
    assert_derives(&auto, &["", "Hello <tool>", CALL, &spoken, &two], &[&wrong, "<tool_call>\n{\"name\": \"x\""]);
    assert!(calls(&weather(ToolChoice::Function { name: "missing".into() }, true)).is_err());
}

#[test]
fn only_strict_functions_need_a_schema_that_can_be_kept() {
    let impossible = serde_json::json!({"type": "object", "properties": {"a": {"type": "nonsense"}}});
    let mut tools = weather(ToolChoice::Required, false);
    tools.functions = vec![function("f", impossible)];
    let loose = calls(&tools).unwrap();
    assert_derives(&loose, &["<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>"], &[]);
    tools.functions[0].strict = true;
    assert!(calls(&tools).unwrap_err().to_string().contains("parameters of f"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_text_is_read_as_a_grammar_or_refused(text in "(root ::= )?[a-c\"\\[\\]()|*+?{}0-9,\\\\.^\\- \n:=<>!#x]{0,60}") {
        if let Ok(grammar) = gbnf(&text)
            && let Ok(mut constraint) = bytes().constrain(&grammar)
        {
            for _ in 0..8 {
                let Some(token) = constraint.look().ok().and_then(|()| (0..END).find(|token| constraint.allows(*token)))
                else { break };
                constraint.take(token as u32).unwrap();
            }
        }
    }
}
