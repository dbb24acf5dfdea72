//! Flags for vLLM and SGLang that follow from a plan, each with its reason: once for callers who wait, once for batches.
//!
//! How the two divide memory: vLLM's documentation, "Optimization and tuning" and `EngineArgs.get_batch_defaults`; SGLang's documentation,
//! "Hyperparameter tuning", and its pull request 10975 (what it keeps free beside weights and KV). Flags as in vLLM 0.33 and SGLang 0.5.23.

use super::{
    decode::Decode,
    hardware::Gpu,
    input::{Refused, at_least_one, part_of, positive, product, refused, sum},
    model::{ElementType, Model},
};
use serde::Serialize;

const MIB: u64 = 1 << 20;
/// GPUs of one machine.
const GPUS_MAX: u64 = 64;
/// The most sequences that are asked of an engine: vLLM's own default on large GPUs.
const SEQUENCES_MAX: u64 = 1024;
/// From here on vLLM takes larger steps by default, except on an A100, where they cost throughput.
const LARGE_GPU_BYTES: u64 = 70 << 30;
/// Prompt tokens of a step while callers wait for their next token.
const INTERACTIVE_STEP_TOKENS: u64 = 2048;

/// Who the engine is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
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

/// Flags of both engines for one use.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Answer {
    /// Who it is for.
    pub used_for: Use,
    /// GPUs that the model is split over.
    pub tensor_parallel: u64,
    /// Memory for KV on each of them.
    pub kv_bytes_per_gpu: u64,
    /// Sequences of average length that this holds.
    pub sequences_that_fit: u64,
    /// Sequences that are asked for.
    pub sequences: u64,
    /// `vllm serve MODEL ...`
    pub vllm: Vec<Flag>,
    /// `python -m sglang.launch_server --model-path MODEL ...`
    pub sglang: Vec<Flag>,
}

fn flag(flag: &'static str, value: impl ToString, reason: impl Into<String>) -> Flag {
    Flag { flag, value: Some(value.to_string()), reason: reason.into() }
}

impl Use {
    /// The part of the memory that vLLM takes.
    fn memory_utilisation(self) -> f64 {
        match self {
            Self::Interactive => 0.9,
            Self::Batch => 0.95,
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

    fn weight_bytes(&self) -> Result<u64, Refused> {
        let weights = self.model.weights.ok_or_else(|| refused("weights", "are not known: give their size"))?;
        Ok(weights.bytes)
    }

    /// Memory for KV on each of so many GPUs.
    fn kv_room(&self, tensor_parallel: u64, memory_utilisation: f64) -> Result<u64, Refused> {
        let usable = part_of(self.gpu.memory_bytes, memory_utilisation);
        let weights = self.weight_bytes()?.div_ceil(tensor_parallel);
        Ok(usable.saturating_sub(sum("memory", [weights, self.activation_bytes])?))
    }

    /// The fewest GPUs, a power of two that divides the heads, on which the longest sequence has room.
    fn tensor_parallel(&self, length: u64, used_for: Use) -> Result<u64, Refused> {
        let gpus = at_least_one("gpus", self.gpus)?;
        if gpus > GPUS_MAX {
            return Err(refused("gpus", format!("is {gpus}: at most {GPUS_MAX} of one machine are looked at")));
        }
        let splits = std::iter::successors(Some(1), |split| Some(split * 2)).take_while(|split| *split <= gpus);
        for split in splits.filter(|split| self.model.heads.is_none_or(|heads| heads.is_multiple_of(*split))) {
            if self.kv_room(split, used_for.memory_utilisation())?
                >= self.model.kv(self.kv, length, 1, split)?.bytes_per_gpu
            {
                return Ok(split);
            }
        }
        let problem = format!(
            "are too few: weights of {} bytes and one sequence of {length} tokens have no room in {gpus} x {}",
            self.weight_bytes()?,
            self.gpu.name
        );
        Err(refused("gpus", problem))
    }

    /// The most sequences whose steps are short enough, by the part of the bandwidth that engines reach.
    fn sequences_within(&self, seconds: f64, split: u64, most: u64) -> Result<u64, Refused> {
        let seconds = positive("seconds-per-token", seconds)?;
        let weights = self.model.weights.ok_or_else(|| refused("weights", "are not known: give their size"))?;
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
            return Err(refused(
                "seconds-per-token",
                format!("is {seconds}: one sequence alone takes {least:.4} on {split} GPUs"),
            ));
        }
        Ok(short)
    }

    /// Does it.
    pub fn answer(&self, used_for: Use) -> Result<Answer, Refused> {
        let length = self.length()?;
        let split = self.tensor_parallel(length, used_for)?;
        let room = self.kv_room(split, used_for.memory_utilisation())?;
        let fit = (room / self.model.kv(self.kv, self.average_tokens, 1, split)?.bytes_per_gpu).max(1);
        let most = fit.min(SEQUENCES_MAX);
        let (sequences, why) = match self.seconds_per_token.filter(|_| used_for == Use::Interactive) {
            Some(seconds) => (
                self.sequences_within(seconds, split, most)?,
                format!("more would take longer than {seconds} s for a token"),
            ),
            None => (most, format!("{fit} sequences of {} tokens fit; at most {SEQUENCES_MAX}", self.average_tokens)),
        };
        let why = if sequences == most && fit <= SEQUENCES_MAX {
            format!("so many sequences of {} tokens have room for their KV", self.average_tokens)
        } else {
            why
        };
        Ok(Answer {
            used_for,
            tensor_parallel: split,
            kv_bytes_per_gpu: room,
            sequences_that_fit: fit,
            sequences,
            vllm: self.vllm(used_for, split, length, (sequences, &why))?,
            sglang: self.sglang(used_for, split, length, (sequences, &why))?,
        })
    }

    /// Prompt tokens of a step.
    fn step_tokens(&self, used_for: Use) -> u64 {
        let large = self.gpu.memory_bytes >= LARGE_GPU_BYTES && !self.gpu.name.starts_with("a100");
        match used_for {
            Use::Interactive => INTERACTIVE_STEP_TOKENS,
            Use::Batch if large => 16_384,
            Use::Batch => 8192,
        }
    }

    /// What both call the type of the cache.
    fn kv_type(&self) -> Result<(&'static str, &'static str), Refused> {
        match self.kv.name {
            "fp16" | "f16" | "bf16" => Ok(("auto", "kept as the model's values are")),
            "fp8" | "fp8_e4m3" => {
                Ok(("fp8_e4m3", "half the bytes of 16 bits: twice the sequences, at a small loss of accuracy"))
            }
            "fp8_e5m2" => {
                Ok(("fp8_e5m2", "half the bytes of 16 bits: twice the sequences, at a small loss of accuracy"))
            }
            other => Err(refused(
                "dtype",
                format!("{other:?} is no cache that vLLM and SGLang keep: fp16, bf16 and fp8 are"),
            )),
        }
    }

    fn common(
        &self,
        names: [&'static str; 4],
        split: u64,
        length: u64,
        sequences: (u64, &str),
    ) -> Result<Vec<Flag>, Refused> {
        let [parallel, longest, running, cache] = names;
        let (kv_type, kv_reason) = self.kv_type()?;
        Ok(vec![
            flag(
                parallel,
                split,
                "the fewest GPUs on which weights and the longest sequence fit; further ones serve more as replicas",
            ),
            flag(
                longest,
                length,
                "longest prompt and longest answer: nothing is reserved beyond, and what is longer is refused at once",
            ),
            flag(running, sequences.0, sequences.1),
            flag(cache, kv_type, kv_reason),
        ])
    }

    fn vllm(&self, used_for: Use, split: u64, length: u64, sequences: (u64, &str)) -> Result<Vec<Flag>, Refused> {
        let names = ["--tensor-parallel-size", "--max-model-len", "--max-num-seqs", "--kv-cache-dtype"];
        let mut flags = self.common(names, split, length, sequences)?;
        let (utilisation, step) = (used_for.memory_utilisation(), self.step_tokens(used_for));
        let (memory, tokens) = match used_for {
            Use::Interactive => (
                "leaves a tenth for what is not counted; running out of memory ends every stream",
                "short steps: a long prompt does not hold up others' next tokens",
            ),
            Use::Batch => (
                "more KV, more sequences together; a restart costs time only",
                "long steps: prompts are read at full speed, and nobody waits for the next token",
            ),
        };
        flags.push(flag("--gpu-memory-utilization", utilisation, memory));
        flags.push(flag("--max-num-batched-tokens", step, tokens));
        flags.push(Flag {
            flag: "--enable-prefix-caching",
            value: None,
            reason: "prompts that begin alike are read once".into(),
        });
        Ok(flags)
    }

    fn sglang(&self, used_for: Use, split: u64, length: u64, sequences: (u64, &str)) -> Result<Vec<Flag>, Refused> {
        let names = ["--tp-size", "--context-length", "--max-running-requests", "--kv-cache-dtype"];
        let mut flags = self.common(names, split, length, sequences)?;
        let chunk = self.step_tokens(used_for);
        let fraction = self.static_fraction(chunk, split, sequences.0)?;
        let (tokens, conservativeness, caution) = match used_for {
            Use::Interactive => (
                "short steps: a long prompt does not hold up others' next tokens",
                1.0,
                "a request that was begun is seldom taken back",
            ),
            Use::Batch => (
                "long steps: prompts are read at full speed",
                0.3,
                "takes more requests at once; one that is taken back is computed again, which nobody waits for",
            ),
        };
        let memory = "weights and KV take this part; the rest is for activations of a step and CUDA graphs";
        flags.push(flag("--mem-fraction-static", format!("{fraction:.2}"), memory));
        flags.push(flag("--chunked-prefill-size", chunk, tokens));
        flags.push(flag("--schedule-conservativeness", format!("{conservativeness:.1}"), caution));
        if used_for == Use::Batch {
            flags.push(flag(
                "--schedule-policy",
                "lpm",
                "those with the longest prefix in the cache first: no batch has an order to keep",
            ));
        }
        Ok(flags)
    }

    /// What weights and KV may take, rounded down to a hundredth: SGLang keeps 1.5 MiB for each token of a step and 2 MiB for each
    /// sequence of its largest CUDA graph.
    fn static_fraction(&self, chunk: u64, split: u64, sequences: u64) -> Result<f64, Refused> {
        let graphs = product("memory", &[sequences.min(512), 2 * MIB])?;
        let step = product("memory", &[chunk.max(2048), 3 * MIB / 2])?;
        let kept = sum("memory", [512 * MIB, step, graphs, split * 128 * MIB])?.max(self.activation_bytes);
        let memory = self.gpu.memory_bytes;
        let hundredths = memory.saturating_sub(kept) * 100 / memory;
        if hundredths < 10 {
            return Err(refused("gpu", format!("{} has no room for steps of {chunk} tokens", self.gpu.name)));
        }
        Ok(hundredths as f64 / 100.0)
    }
}
