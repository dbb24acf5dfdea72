//! Flags for vLLM and SGLang that follow from a plan, each with its reason: once for callers who wait, once for batches.
//!
//! How the two divide memory: vLLM's documentation, "Optimization and tuning" and `EngineArgs.get_batch_defaults`; SGLang's documentation,
//! "Hyperparameter tuning", and its pull request 10975 (what it keeps free beside weights and KV). Flags as in the documentation of both.

use super::{
    decode::Decode,
    hardware::Gpu,
    input::{Refused, at_least_one, part_of, positive, product, refused, sum},
    model::{ElementType, Model, Weights},
};
use serde::Serialize;

const MIB: u64 = 1 << 20;
/// GPUs of one machine.
const GPUS_MAX: u64 = 64;
/// The most sequences that are asked of an engine: vLLM's own default on large GPUs.
const SEQUENCES_MAX: u64 = 1024;
/// From here on vLLM takes larger steps by default, except on an A100, where they cost throughput.
const VLLM_LARGE_BYTES: u64 = 70 << 30;
/// From here on SGLang does.
const SGLANG_LARGE_BYTES: u64 = 160 << 30;
const SGLANG_MEDIUM_BYTES: u64 = 35 << 30;
/// Sequences of SGLang's largest CUDA graph.
const GRAPH_SEQUENCES: u64 = 512;
/// Prompt tokens of a step while callers wait for their next token.
const INTERACTIVE_STEP_TOKENS: u64 = 2048;

/// Who the engine is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// Callers who wait.
    Interactive,
    /// Nobody waits.
    Batch,
}

/// A plan.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plan<'a> {
    /// The model; its weights must be known.
    pub model: &'a Model,
    /// How KV is to be kept.
    pub kv: ElementType,
    /// Each GPU.
    pub gpu: Gpu,
    /// How many there are.
    pub gpus: u64,
    /// The longest prompt.
    pub prompt_tokens: u64,
    /// The longest answer.
    pub output_tokens: u64,
    /// Tokens of a sequence on average, for how many fit.
    pub average_tokens: u64,
    /// Longest time between two tokens that callers accept, if they do not accept any.
    pub seconds_per_token: Option<f64>,
    /// Memory for activations on each GPU.
    pub activation_bytes: u64,
}

/// One flag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Flag {
    /// As the command line has it.
    pub flag: &'static str,
    /// Its value; none for a switch.
    pub value: Option<String>,
    /// Why.
    pub reason: String,
}

/// Who serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// `vllm serve MODEL ...`
    Vllm,
    /// `python -m sglang.launch_server --model-path MODEL ...`
    Sglang,
}

/// Flags of one engine for one use.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    /// GPUs that the model is split over.
    pub tensor_parallel: u64,
    /// Memory for KV on each of them.
    pub kv_bytes_per_gpu: u64,
    /// Sequences of average length that this holds.
    pub sequences_that_fit: u64,
    /// Sequences that are asked for.
    pub sequences: u64,
    /// The whole line.
    pub command: String,
    /// Its flags.
    pub flags: Vec<Flag>,
}

fn flag(flag: &'static str, value: impl ToString, reason: impl Into<String>) -> Flag {
    Flag { flag, value: Some(value.to_string()), reason: reason.into() }
}

impl Engine {
    fn command(self) -> &'static str {
        match self {
            Self::Vllm => "vllm serve MODEL",
            Self::Sglang => "python -m sglang.launch_server --model-path MODEL",
        }
    }
}

impl Plan<'_> {
    fn length(&self) -> Result<u64, Refused> {
        let prompt = at_least_one("prompt-tokens", self.prompt_tokens)?;
        let length = sum("tokens", [prompt, at_least_one("output-tokens", self.output_tokens)?])?;
        if let Some(limit) = self.model.context_tokens.filter(|limit| length > *limit) {
            let problem = format!("and output-tokens are {length} together: the model was made for {limit}");
            return Err(refused("prompt-tokens", problem));
        }
        if at_least_one("average-tokens", self.average_tokens)? > length {
            return Err(refused("average-tokens", format!("is more than the longest sequence of {length}")));
        }
        Ok(length)
    }

    fn weights(&self) -> Result<Weights, Refused> {
        self.model.weights.ok_or_else(|| refused("weights", "are not known: give their size"))
    }

    /// The part of the memory that the engine is told to take: vLLM for everything, SGLang for weights and KV.
    fn memory_share(&self, engine: Engine, used_for: Use) -> Result<f64, Refused> {
        match (engine, used_for) {
            (Engine::Vllm, Use::Interactive) => Ok(0.9),
            (Engine::Vllm, Use::Batch) => Ok(0.95),
            (Engine::Sglang, _) => self.static_fraction(self.step_tokens(engine, used_for)),
        }
    }

    /// Memory for KV on each of so many GPUs.
    fn kv_room(&self, engine: Engine, used_for: Use, split: u64) -> Result<u64, Refused> {
        let usable = part_of(self.gpu.memory_bytes, self.memory_share(engine, used_for)?);
        let weights = self.weights()?.bytes.div_ceil(split);
        let activations = if engine == Engine::Vllm { self.activation_bytes } else { 0 };
        Ok(usable.saturating_sub(sum("memory", [weights, activations])?))
    }

    /// Sequences of average length that so many GPUs hold; none if the longest has no room.
    fn fit(&self, engine: Engine, used_for: Use, split: u64, length: u64) -> Result<u64, Refused> {
        let room = self.kv_room(engine, used_for, split)?;
        let takes = |tokens| Ok(self.model.kv(self.kv, tokens, 1, split)?.bytes_per_gpu);
        Ok(if takes(length)? > room { 0 } else { room / takes(self.average_tokens)? })
    }

    /// The fewest GPUs, a power of two that divides the heads, of which twice as many would not hold twice as many sequences
    /// altogether: weights that are kept once less give room to KV, until splitting gains little and costs exchanges between GPUs.
    fn tensor_parallel(&self, engine: Engine, used_for: Use, length: u64) -> Result<u64, Refused> {
        let gpus = at_least_one("gpus", self.gpus)?;
        if gpus > GPUS_MAX {
            return Err(refused("gpus", format!("is {gpus}: at most {GPUS_MAX} of one machine are looked at")));
        }
        let splits = std::iter::successors(Some(1), |split| Some(split * 2)).take_while(|split| *split <= gpus);
        let (mut chosen, mut held) = (0, 0);
        for split in splits.filter(|split| self.model.heads.is_none_or(|heads| heads.is_multiple_of(*split))) {
            let together = (gpus / split).saturating_mul(self.fit(engine, used_for, split, length)?);
            if held > 0 && together / 2 < held {
                break;
            }
            (chosen, held) = (split, together);
        }
        if held > 0 {
            return Ok(chosen);
        }
        let (weights, name) = (self.weights()?.bytes, self.gpu.name);
        let problem = format!(
            "are too few: weights of {weights} bytes and one sequence of {length} tokens have no room in {gpus} x {name}"
        );
        Err(refused("gpus", problem))
    }

    /// The most sequences whose steps are short enough, by the part of the bandwidth that engines reach.
    fn sequences_within(&self, seconds: f64, split: u64, most: u64) -> Result<u64, Refused> {
        let seconds = positive("seconds-per-token", seconds)?;
        let weights = self.weights()?;
        let kv_bytes_per_sequence = self.model.kv_bytes(self.kv, self.average_tokens)?;
        let memory_bytes_per_second = self.gpu.memory_bytes_per_second * split as f64;
        let takes = |batch| {
            let step =
                Decode { weights, kv_bytes_per_sequence, batch, memory_bytes_per_second, flops_per_second: None };
            Ok(step.answer()?.calibrated(self.gpu.decode_efficiency)?.seconds_per_token)
        };
        let (mut short, mut long) = (0, most + 1);
        while long - short > 1 {
            let middle = short + (long - short) / 2;
            if takes(middle)? <= seconds { short = middle } else { long = middle }
        }
        if short == 0 {
            let least = takes(1)?;
            let problem = format!("is {seconds}: one sequence alone takes {least:.4} on {split} GPUs");
            return Err(refused("seconds-per-token", problem));
        }
        Ok(short)
    }

    /// How many sequences to ask for, and why not more.
    fn sequences(&self, used_for: Use, split: u64, fit: u64) -> Result<(u64, String), Refused> {
        let most = fit.min(SEQUENCES_MAX);
        if let Some(seconds) = self.seconds_per_token.filter(|_| used_for == Use::Interactive) {
            let within = self.sequences_within(seconds, split, most)?;
            if within < most {
                return Ok((within, format!("more would take longer than {seconds} s for a token")));
            }
        }
        let tokens = self.average_tokens;
        let why = if fit > SEQUENCES_MAX {
            format!("{fit} sequences of {tokens} tokens have room; engines gain little beyond {SEQUENCES_MAX}")
        } else {
            format!("so many sequences of {tokens} tokens have room for their KV")
        };
        Ok((most, why))
    }

    /// Does it.
    pub fn answer(&self, engine: Engine, used_for: Use) -> Result<Answer, Refused> {
        let length = self.length()?;
        let tensor_parallel = self.tensor_parallel(engine, used_for, length)?;
        let kv_bytes_per_gpu = self.kv_room(engine, used_for, tensor_parallel)?;
        let sequences_that_fit = self.fit(engine, used_for, tensor_parallel, length)?;
        let (sequences, why) = self.sequences(used_for, tensor_parallel, sequences_that_fit)?;
        let mut flags = self.common(engine, tensor_parallel, length, (sequences, &why))?;
        flags.extend(match engine {
            Engine::Vllm => self.vllm(used_for)?,
            Engine::Sglang => self.sglang(used_for)?,
        });
        let word = |flag: &Flag| {
            flag.value.as_ref().map_or_else(|| flag.flag.to_owned(), |value| format!("{} {value}", flag.flag))
        };
        let words = std::iter::once(engine.command().to_owned()).chain(flags.iter().map(word));
        let command = words.collect::<Vec<_>>().join(" ");
        Ok(Answer { tensor_parallel, kv_bytes_per_gpu, sequences_that_fit, sequences, command, flags })
    }

    /// Prompt tokens of a step: what each engine takes itself on such a GPU where nobody waits.
    fn step_tokens(&self, engine: Engine, used_for: Use) -> u64 {
        let memory = self.gpu.memory_bytes;
        match (used_for, engine) {
            (Use::Interactive, _) => INTERACTIVE_STEP_TOKENS,
            (Use::Batch, Engine::Vllm) if memory >= VLLM_LARGE_BYTES && !self.gpu.name.starts_with("a100") => 16_384,
            (Use::Batch, Engine::Vllm) => 8192,
            (Use::Batch, Engine::Sglang) if memory >= SGLANG_LARGE_BYTES => 16_384,
            (Use::Batch, Engine::Sglang) if memory >= SGLANG_MEDIUM_BYTES => 8192,
            (Use::Batch, Engine::Sglang) => 2048,
        }
    }

    /// What the cache's type is called.
    fn kv_type(&self) -> Result<(&'static str, &'static str), Refused> {
        const HALF: &str = "half the bytes of 16 bits: twice the sequences, at a small loss of accuracy";
        match self.kv.name {
            "fp16" | "f16" | "bf16" => Ok(("auto", "kept as the model's values are")),
            "fp8" | "fp8_e4m3" => Ok(("fp8_e4m3", HALF)),
            "fp8_e5m2" => Ok(("fp8_e5m2", HALF)),
            other => {
                let problem = format!("{other:?} is no cache that vLLM and SGLang keep: fp16, bf16 and fp8 are");
                Err(refused("dtype", problem))
            }
        }
    }

    fn common(&self, engine: Engine, split: u64, length: u64, sequences: (u64, &str)) -> Result<Vec<Flag>, Refused> {
        let [parallel, longest, running] = match engine {
            Engine::Vllm => ["--tensor-parallel-size", "--max-model-len", "--max-num-seqs"],
            Engine::Sglang => ["--tp-size", "--context-length", "--max-running-requests"],
        };
        let (kv_type, kv_reason) = self.kv_type()?;
        Ok(vec![
            flag(
                parallel,
                split,
                "the fewest GPUs of which twice as many would not hold twice the sequences; more serve as further replicas",
            ),
            flag(longest, length, "longest prompt and longest answer; what is longer is refused at once"),
            flag(running, sequences.0, sequences.1),
            flag("--kv-cache-dtype", kv_type, kv_reason),
        ])
    }

    fn vllm(&self, used_for: Use) -> Result<Vec<Flag>, Refused> {
        let (memory, tokens) = match used_for {
            Use::Interactive => (
                "leaves a tenth for what is not counted: running out of memory ends every stream",
                "short steps: a long prompt does not hold up others' next tokens",
            ),
            Use::Batch => (
                "more KV, more sequences together; a restart costs time only",
                "long steps: prompts are read at full speed, and nobody waits for the next token",
            ),
        };
        let shared = "prompts that begin alike are read once".to_owned();
        Ok(vec![
            flag("--gpu-memory-utilization", self.memory_share(Engine::Vllm, used_for)?, memory),
            flag("--max-num-batched-tokens", self.step_tokens(Engine::Vllm, used_for), tokens),
            Flag { flag: "--enable-prefix-caching", value: None, reason: shared },
        ])
    }

    fn sglang(&self, used_for: Use) -> Result<Vec<Flag>, Refused> {
        let chunk = self.step_tokens(Engine::Sglang, used_for);
        let fraction = self.memory_share(Engine::Sglang, used_for)?;
        let (tokens, conservativeness, caution) = match used_for {
            Use::Interactive => (
                "short steps: a long prompt does not hold up others' next tokens",
                "1.0",
                "a request that was begun is seldom taken back",
            ),
            Use::Batch => (
                "long steps: prompts are read at full speed",
                "0.3",
                "takes more requests at once; one that is taken back is computed again, which nobody waits for",
            ),
        };
        let memory = "weights and KV take this part; the rest is for a step's activations and CUDA graphs";
        let mut flags = vec![
            flag("--mem-fraction-static", format!("{fraction:.2}"), memory),
            flag("--chunked-prefill-size", chunk, tokens),
            flag("--schedule-conservativeness", conservativeness, caution),
        ];
        if used_for == Use::Batch {
            let order = "those with the longest prefix in the cache first: a batch has no order to keep";
            flags.push(flag("--schedule-policy", "lpm", order));
        }
        Ok(flags)
    }

    /// What weights and KV may take, rounded down to a hundredth: SGLang keeps 1.5 MiB for each token of a step and 2 MiB for each
    /// sequence of its largest CUDA graph, and half a gibibyte.
    fn static_fraction(&self, chunk: u64) -> Result<f64, Refused> {
        let step = product("memory", &[chunk.max(2048), 3 * MIB / 2])?;
        let kept = sum("memory", [512 * MIB, step, GRAPH_SEQUENCES * 2 * MIB])?.max(self.activation_bytes);
        let memory = self.gpu.memory_bytes;
        let free = u128::from(memory.saturating_sub(kept)) * 100;
        let hundredths = free / u128::from(at_least_one("gpu-memory", memory)?);
        if hundredths < 10 {
            return Err(refused("gpu", format!("{} has no room for steps of {chunk} tokens", self.gpu.name)));
        }
        Ok(hundredths as f64 / 100.0)
    }
}
