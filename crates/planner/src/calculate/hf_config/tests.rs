//! Configs as their publishers wrote them, cut to what is read, beside what is known of the models.

use super::*;

fn read(text: &str) -> Model {
    parse(text, None).unwrap()
}

fn refusal(text: &str) -> String {
    parse(text, None).unwrap_err().to_string()
}

const LLAMA_8B: &str = r#"{"model_type":"llama","hidden_size":4096,"intermediate_size":14336,"num_attention_heads":32,"num_hidden_layers":32,
    "num_key_value_heads":8,"vocab_size":128256,"tie_word_embeddings":false,"torch_dtype":"bfloat16","max_position_embeddings":131072}"#;
const LLAMA_70B: &str = r#"{"model_type":"llama","hidden_size":8192,"intermediate_size":28672,"num_attention_heads":64,"num_hidden_layers":80,
    "num_key_value_heads":8,"vocab_size":128256,"torch_dtype":"bfloat16"}"#;
const QWEN_HALF_B: &str = r#"{"model_type":"qwen2","hidden_size":896,"intermediate_size":4864,"num_attention_heads":14,"num_hidden_layers":24,
    "num_key_value_heads":2,"vocab_size":151936,"tie_word_embeddings":true,"torch_dtype":"bfloat16","sliding_window":32768,"max_window_layers":21,
    "use_sliding_window":false}"#;
const MIXTRAL: &str = r#"{"model_type":"mixtral","hidden_size":4096,"intermediate_size":14336,"num_attention_heads":32,"num_hidden_layers":32,
    "num_key_value_heads":8,"vocab_size":32000,"num_local_experts":8,"num_experts_per_tok":2,"sliding_window":null,"torch_dtype":"bfloat16"}"#;
const QWEN3_MOE: &str = r#"{"model_type":"qwen3_moe","hidden_size":2048,"intermediate_size":6144,"moe_intermediate_size":768,"num_attention_heads":32,
    "num_hidden_layers":48,"num_key_value_heads":4,"head_dim":128,"vocab_size":151936,"num_experts":128,"num_experts_per_tok":8,
    "decoder_sparse_step":1,"mlp_only_layers":[],"torch_dtype":"bfloat16","sliding_window":null,"use_sliding_window":false}"#;
const DEEPSEEK_V3: &str = r#"{"model_type":"deepseek_v3","hidden_size":7168,"intermediate_size":18432,"moe_intermediate_size":2048,"num_attention_heads":128,
    "num_hidden_layers":61,"num_key_value_heads":128,"vocab_size":129280,"n_routed_experts":256,"num_experts_per_tok":8,"n_shared_experts":1,
    "first_k_dense_replace":3,"moe_layer_freq":1,"q_lora_rank":1536,"kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,
    "v_head_dim":128,"torch_dtype":"bfloat16","quantization_config":{"quant_method":"fp8"}}"#;
const GEMMA2_2B: &str = r#"{"model_type":"gemma2","hidden_size":2304,"intermediate_size":9216,"num_attention_heads":8,"num_hidden_layers":26,
    "num_key_value_heads":4,"head_dim":256,"vocab_size":256000,"sliding_window":4096,"torch_dtype":"float32"}"#;

const GPT_OSS_20B: &str = r#"{"model_type":"gpt_oss","hidden_size":2880,"intermediate_size":2880,"num_attention_heads":64,"num_hidden_layers":24,
    "num_key_value_heads":8,"head_dim":64,"vocab_size":201088,"num_local_experts":32,"num_experts_per_tok":4,"sliding_window":128,
    "tie_word_embeddings":false,"quantization_config":{"quant_method":"mxfp4"}}"#;

/// Parameters that publishers name, in billions, with norms and biases: below a thousandth more than matrices.
#[test]
fn parameters_agree_with_what_publishers_count() {
    for (name, text, known, element_bytes) in [
        ("Llama-3.1-8B", LLAMA_8B, 8_030_261_248u64, 2),
        ("Llama-3.1-70B", LLAMA_70B, 70_553_706_496, 2),
        ("Qwen2.5-0.5B", QWEN_HALF_B, 494_032_768, 2),
        ("Mixtral-8x7B", MIXTRAL, 46_702_792_704, 2),
        ("Qwen3-30B-A3B", QWEN3_MOE, 30_532_122_624, 2),
        ("DeepSeek-V3", DEEPSEEK_V3, 671_026_419_200, 1),
        ("gemma-2-2b", GEMMA2_2B, 2_614_341_888, 4),
    ] {
        let weights = read(text).weights.unwrap();
        let experts = weights.experts.map_or(0, |experts| experts.bytes);
        assert!(weights.step_bytes + experts <= weights.bytes, "{name}");
        let parameters = weights.bytes / element_bytes;
        let missing = known as f64 - parameters as f64;
        assert!((0.0..0.001 * known as f64).contains(&missing), "{name}: {parameters} of {known}");
    }
    // 3.3 billion of Qwen3-30B-A3B are active, 37 of DeepSeek-V3, 12.9 of Mixtral; a table of embeddings is looked up.
    for (text, active) in [(QWEN3_MOE, 3.3e9), (DEEPSEEK_V3, 37e9), (MIXTRAL, 12.9e9)] {
        let used = read(text).weights.unwrap().token_parameters as f64;
        assert!((used / active - 1.0).abs() < 0.1, "{used} of {active}");
    }
    let read_each_step = read(LLAMA_8B).weights.unwrap().step_bytes;
    assert!((read_each_step as f64 / 15_009_326_848.0 - 1.0).abs() < 0.001, "{read_each_step}");
}

#[test]
fn kv_is_that_of_the_layers() {
    let fp16 = ElementType::named("fp16").unwrap();
    for (text, bytes) in
        [(LLAMA_8B, 131_072), (LLAMA_70B, 327_680), (QWEN_HALF_B, 12_288), (DEEPSEEK_V3, 70_272), (QWEN3_MOE, 98_304)]
    {
        assert_eq!(read(text).kv_bytes_per_token(fp16), Ok(bytes));
    }
    // Every second layer of gemma-2 has a window of 4,096 tokens.
    let layer = 4 * 256 * 2 * 2;
    assert_eq!(read(GEMMA2_2B).kv_bytes(fp16, 8192), Ok(13 * layer * 4096 + 13 * layer * 8192));
    let gemma3 = GEMMA2_2B.replace("gemma2", "gemma3_text").replace("4096", "512");
    assert_eq!(read(&gemma3).kv_bytes(fp16, 8192), Ok(22 * layer * 512 + 4 * layer * 8192));
    let named = LLAMA_8B.replace(
        "\"num_hidden_layers\":32",
        r#""num_hidden_layers":2,"sliding_window":128,"layer_types":["sliding_attention","full_attention"]"#,
    );
    assert_eq!(read(&named).kv_bytes(fp16, 1000), Ok(4096 * 128 + 4096 * 1000));
    let windowed = QWEN_HALF_B.replace("\"use_sliding_window\":false", "\"use_sliding_window\":true");
    assert_eq!(read(&windowed).layers.iter().map(|layers| layers.count).collect::<Vec<_>>(), [3, 21]);
}

#[test]
fn experts_in_four_bits_are_counted_beside_the_rest_in_sixteen() {
    // The published checkpoint has 12.8 GiB; a token uses 3.6 billion parameters, and every second layer sees 128 tokens.
    let model = read(GPT_OSS_20B);
    let weights = model.weights.unwrap();
    assert!((weights.bytes as f64 / (12.8 * 1024f64.powi(3)) - 1.0).abs() < 0.005, "{}", weights.bytes);
    assert!((weights.token_parameters as f64 / 3.6e9 - 1.0).abs() < 0.02, "{}", weights.token_parameters);
    assert_eq!(weights.experts.map(|experts| experts.bytes), Some(24 * 32 * 3 * 2880 * 2880 / 32 * 17));
    let row = 2 * 8 * 64 * 2;
    assert_eq!(model.kv_bytes(ElementType::named("bf16").unwrap(), 1000), Ok(12 * row * 128 + 12 * row * 1000));
}

#[test]
fn what_is_not_understood_is_refused_and_not_guessed() {
    for (text, words) in [
        ("", "not JSON"),
        ("[]", "not an object"),
        ("{}", "no model_type"),
        (r#"{"model_type":"mamba2"}"#, "not understood"),
        (r#"{"model_type":"deepseek_v32"}"#, "not understood"),
        (r#"{"model_type":"gemma3","text_config":{}}"#, "text_config"),
        (r#"{"model_type":"llama"}"#, "hidden_size is missing"),
    ] {
        assert!(refusal(text).contains(words), "{text}: {}", refusal(text));
    }
    let changed = |from: &str, to: &str| {
        let text = LLAMA_8B.replace(from, to);
        assert_ne!(text, LLAMA_8B);
        refusal(&text)
    };
    assert!(changed("\"num_hidden_layers\":32", "\"num_hidden_layers\":0").contains("at least 1"));
    assert!(changed("\"hidden_size\":4096", "\"hidden_size\":-4096").contains("not a whole number"));
    assert!(changed("\"hidden_size\":4096", "\"hidden_size\":4097").contains("no multiple"));
    assert!(changed("\"hidden_size\":4096", "\"hidden_size\":18446744073709551584").contains("too large"));
    assert!(changed("bfloat16", "int3").contains("unknown"));
    assert!(
        changed("\"vocab_size\":128256", r#""vocab_size":1,"layer_types":["linear_attention"]"#).contains("1 layers")
    );
    assert!(
        changed("\"num_hidden_layers\":32", r#""num_hidden_layers":1,"layer_types":["linear_attention"]"#)
            .contains("linear_attention")
    );
    let many = MIXTRAL.replace("\"num_experts_per_tok\":2", "\"num_experts_per_tok\":9");
    assert!(refusal(&many).contains("some of them"));
    // Bytes of weights that are quantised in a way the file does not spell out are not made up.
    let quantised = LLAMA_8B.replacen('{', r#"{"quantization_config":{"quant_method":"awq"},"#, 1);
    assert_eq!(read(&quantised).weights, None);
    assert!(parse(&quantised, Some(ElementType::named("q4_0").unwrap())).unwrap().weights.is_some());
}
