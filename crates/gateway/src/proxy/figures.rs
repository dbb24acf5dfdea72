//! What servers say of themselves, in the names of vLLM, SGLang and llama-server.

use super::prompt::hash_of;

/// The sum of the samples with one of these names that were found.
fn sum(text: &str, names: &[&str]) -> Option<f64> {
    let mut total = None;
    for line in text.lines() {
        let Some(name_end) = line.find(['{', ' ']) else { continue };
        if names.contains(&&line[..name_end])
            && let Some(value) = value_of(line)
        {
            *total.get_or_insert(0.0) += value;
        }
    }
    total
}

fn value_of(line: &str) -> Option<f64> {
    // Behind the labels, whose texts may hold anything but an unescaped quotation mark.
    let rest =
        line.rfind('}').map_or_else(|| line.split_once(' ').map(|(_, rest)| rest), |at| Some(&line[at + 1..]))?;
    rest.split_ascii_whitespace().next()?.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0)
}

/// A label of the first sample with this name.
fn label<'a>(text: &'a str, name: &str, label: &str) -> Option<&'a str> {
    let line = text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')))?;
    let (_, rest) = line.split_once(&format!("{label}=\""))?;
    rest.split_once('"').map(|(value, _)| value)
}

/// Requests that a server has, running and waiting.
pub(super) fn requests(text: &str) -> Option<u32> {
    let names = [
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "sglang:num_running_reqs",
        "sglang:num_queue_reqs",
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
    ];
    sum(text, &names).map(|requests| requests.min(f64::from(u32::MAX)) as u32)
}

/// Tokens of prompts that a server can keep.
pub(super) fn capacity_tokens(text: &str) -> Option<u64> {
    let number = |name| label(text, "vllm:cache_config_info", name)?.parse::<u64>().ok();
    let vllm = || number("num_gpu_blocks")?.checked_mul(number("block_size")?);
    let sglang = || sum(text, &["sglang:max_total_num_tokens"]).map(|tokens| tokens as u64);
    vllm().or_else(sglang).filter(|tokens| *tokens > 0)
}

/// What a server has counted since it began.
pub(super) fn counted(text: &str) -> Option<f64> {
    let names = [
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "sglang:prompt_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:prompt_tokens_total",
        "llamacpp:tokens_predicted_total",
    ];
    sum(text, &names)
}

/// Which life of a server this is, if it says when it began.
pub(super) fn instance(text: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with("process_start_time_seconds"))?;
    Some(hash_of(value_of(line)?.to_string().as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loads_are_read_in_every_servers_names() {
        let vllm = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"a} b\"} 3.0\n\
                    vllm:num_requests_waiting{model_name=\"a\"} 2.0\nvllm:num_requests_waiting_by_reason{a=\"b\"} 9\n";
        assert_eq!(requests(vllm), Some(5));
        assert_eq!(requests("sglang:num_running_reqs{a=\"b\"} 7\nsglang:num_queue_reqs 1 1700000000\n"), Some(8));
        assert_eq!(requests("llamacpp:requests_processing 4\nllamacpp:requests_deferred NaN\n"), Some(4));
        for nothing in ["", "up 1\n", "llamacpp:requests_processing -1\n", "llamacpp:requests_processing\n", "{} }"] {
            assert_eq!(requests(nothing), None, "{nothing:?}");
        }
        assert_eq!(requests("llamacpp:requests_processing 1e99\n"), Some(u32::MAX));
    }

    #[test]
    fn capacity_and_life_are_read() {
        let vllm = "vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"1000\",x=\"None\"} 1.0\n";
        assert_eq!(capacity_tokens(vllm), Some(16_000));
        assert_eq!(capacity_tokens("vllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"None\"} 1\n"), None);
        assert_eq!(capacity_tokens("sglang:max_total_num_tokens{a=\"b\"} 4096\n"), Some(4096));
        let llama = "llamacpp:prompt_tokens_total 40\nllamacpp:tokens_predicted_total 2\nllamacpp:n_decode_total 9\n";
        assert_eq!((counted(llama), counted("a 1\n")), (Some(42.0), None));
        let (one, two) = (instance("process_start_time_seconds 1.5\n"), instance("process_start_time_seconds 2.5\n"));
        assert!(one.is_some() && one != two && instance("a 1\n").is_none());
    }
}
