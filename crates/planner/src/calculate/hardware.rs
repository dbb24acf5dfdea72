//! GPUs and the ways between tiers, as their makers describe them, and what was reached of that.
//!
//! GPUs: NVIDIA's and AMD's data sheets, without sparsity, decimal bytes. Links: line rates, and what was measured over them
//! where somebody published it. A caller who has measured puts that in the place of any of these.

use super::input::{Refused, refused};
use serde::Serialize;

/// What is reached of a data sheet's bandwidth by generating: where that comes from.
pub const DECODE_EFFICIENCY_SOURCE: &str = "AIConfigurator 0.12's kernel database, Llama-3.1-8B bf16, 1,024 tokens, batch 1: A100 0.65, H100 0.69, \
     H200 0.63, L40S 0.94 of the bandwidth";
/// What is reached of a data sheet's operations by reading prompts.
pub const PREFILL_EFFICIENCY: f64 = 0.5;
/// Where that comes from.
pub const PREFILL_EFFICIENCY_SOURCE: &str =
    "assumed; AIConfigurator 0.12's kernel database has 0.51 to 0.71 for 1,024 tokens of Llama-3.1-8B on one GPU";
/// Memory with high bandwidth reaches this much of it.
const HBM_EFFICIENCY: f64 = 0.65;
/// Graphics memory reaches this much.
const GDDR_EFFICIENCY: f64 = 0.9;

/// A GPU.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gpu {
    /// What it is called.
    pub name: &'static str,
    /// Its memory, as the data sheet says (decimal).
    pub memory_bytes: u64,
    /// How fast that is read.
    pub memory_bytes_per_second: f64,
    /// Operations with 16-bit numbers, dense.
    pub bf16_flops_per_second: f64,
    /// The part of its bandwidth that generating is expected to reach.
    pub decode_efficiency: f64,
    /// Where the figures come from.
    pub source: &'static str,
}

const fn gpu(
    name: &'static str,
    (gigabytes, gigabytes_per_second, teraflops): (u64, f64, f64),
    decode_efficiency: f64,
    source: &'static str,
) -> Gpu {
    Gpu {
        name,
        memory_bytes: gigabytes * 1_000_000_000,
        memory_bytes_per_second: gigabytes_per_second * 1e9,
        bf16_flops_per_second: teraflops * 1e12,
        decode_efficiency,
        source,
    }
}

/// Every GPU that is known.
pub const GPUS: [Gpu; 16] = [
    gpu("a100-40gb-sxm", (40, 1555.0, 312.0), HBM_EFFICIENCY, "NVIDIA A100 data sheet"),
    gpu("a100-80gb-pcie", (80, 1935.0, 312.0), HBM_EFFICIENCY, "NVIDIA A100 data sheet"),
    gpu("a100-80gb-sxm", (80, 2039.0, 312.0), HBM_EFFICIENCY, "NVIDIA A100 data sheet"),
    gpu("a800-80gb-sxm", (80, 2039.0, 312.0), HBM_EFFICIENCY, "NVIDIA A800 data sheet"),
    gpu("h100-pcie", (80, 2000.0, 756.0), HBM_EFFICIENCY, "NVIDIA H100 data sheet"),
    gpu("h100-sxm", (80, 3350.0, 989.0), HBM_EFFICIENCY, "NVIDIA H100 data sheet"),
    gpu("h800-sxm", (80, 3350.0, 989.0), HBM_EFFICIENCY, "NVIDIA H800 data sheet"),
    gpu("h200-sxm", (141, 4800.0, 989.0), HBM_EFFICIENCY, "NVIDIA H200 data sheet"),
    gpu("h20", (96, 4000.0, 148.0), HBM_EFFICIENCY, "NVIDIA H20 data sheet"),
    gpu("b200", (180, 8000.0, 2250.0), HBM_EFFICIENCY, "NVIDIA HGX B200 data sheet, an eighth of it"),
    gpu("mi300x", (192, 5300.0, 1307.4), HBM_EFFICIENCY, "AMD Instinct MI300X data sheet; efficiency as NVIDIA's"),
    gpu("l40s", (48, 864.0, 362.05), GDDR_EFFICIENCY, "NVIDIA L40S data sheet"),
    gpu("l4", (24, 300.0, 121.0), GDDR_EFFICIENCY, "NVIDIA L4 data sheet; efficiency as L40S"),
    gpu("a10", (24, 600.0, 125.0), GDDR_EFFICIENCY, "NVIDIA A10 data sheet; efficiency as L40S"),
    gpu("t4", (16, 320.0, 65.0), GDDR_EFFICIENCY, "NVIDIA T4 data sheet (fp16); efficiency as L40S"),
    gpu("rtx-4090", (24, 1008.0, 165.2), GDDR_EFFICIENCY, "NVIDIA Ada architecture paper; efficiency as L40S"),
];

/// A way from one place to another.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    /// What it is called.
    pub name: &'static str,
    /// What it could carry.
    pub ceiling_bytes_per_second: f64,
    /// What was carried over it.
    pub calibrated_bytes_per_second: f64,
    /// Where the figures come from.
    pub source: &'static str,
}

const fn link(name: &'static str, ceiling: f64, calibrated: f64, source: &'static str) -> Link {
    Link { name, ceiling_bytes_per_second: ceiling * 1e9, calibrated_bytes_per_second: calibrated * 1e9, source }
}

const ETHERNET: &str = "line rate; 92 to 94 % of it after headers";
const RDMA: &str = "line rate; 87 of 100 GB/s over 4 x 200 Gbit/s RoCE (Mooncake's README)";

/// Every link that is known, in the order of its speed within each kind.
pub const LINKS: [Link; 18] = [
    link("eth10", 1.25, 1.15, ETHERNET),
    link("eth25", 3.125, 2.9, ETHERNET),
    link("eth100", 12.5, 11.5, ETHERNET),
    link("eth400", 50.0, 47.0, ETHERNET),
    link("rdma100", 12.5, 10.9, RDMA),
    link("rdma200", 25.0, 21.7, RDMA),
    link("rdma400", 50.0, 43.5, RDMA),
    link("rdma800", 100.0, 87.0, RDMA),
    link("nvme4", 7.0, 6.8, "PCIe 4 x4 as drives name it; Samsung PM9A3, sequential reads"),
    link("nvme5", 14.0, 13.0, "PCIe 5 x4 as drives name it; Samsung PM1743, sequential reads"),
    link("nvme6", 28.0, 28.0, "Micron 9650, sequential reads, as its maker says"),
    link("pcie4_x16", 32.0, 25.0, "PCIe 4 x16; 25 after protocol, not measured"),
    link("pcie5_x16", 64.0, 54.0, "PCIe 5 x16; pinned host memory to an H20, published measurement"),
    link("nvlink_a100", 300.0, 300.0, "NVLink 3, one way, NVIDIA A100 data sheet; not measured"),
    link("nvlink_h100", 450.0, 450.0, "NVLink 4, one way, NVIDIA H100 data sheet; not measured"),
    link("ddr5_8ch", 307.2, 282.0, "DDR5-4800, 8 channels; Xeon 8559C (Mooncake's EFA notes)"),
    link("hbm_h100", 1675.0, 1675.0, "half of the bandwidth: a copy reads and writes; not measured"),
    link("hbm_h200", 2400.0, 2400.0, "half of the bandwidth: a copy reads and writes; not measured"),
];

impl Gpu {
    /// The GPU of this name.
    pub fn named(name: &str) -> Result<Self, Refused> {
        let found = GPUS.into_iter().find(|known| known.name.eq_ignore_ascii_case(name));
        found.ok_or_else(|| {
            let known: Vec<&str> = GPUS.iter().map(|known| known.name).collect();
            let problem =
                format!("{name:?} is unknown: there are {}; for another one give its figures", known.join(", "));
            refused("gpu", problem)
        })
    }
}

impl Link {
    /// The link of this name.
    pub fn named(name: &str) -> Result<Self, Refused> {
        let found = LINKS.into_iter().find(|known| known.name.eq_ignore_ascii_case(name));
        found.ok_or_else(|| {
            let known: Vec<&str> = LINKS.iter().map(|known| known.name).collect();
            let problem = format!(
                "{name:?} is unknown: there are {}; for another one write NAME=SPEED, such as disk=3.2GB/s",
                known.join(", ")
            );
            refused("link", problem)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_sane_and_found_by_name() {
        for gpu in GPUS {
            assert_eq!(Gpu::named(&gpu.name.to_uppercase()), Ok(gpu));
            assert!((0.5..=1.0).contains(&gpu.decode_efficiency) && gpu.memory_bytes >= 16_000_000_000, "{gpu:?}");
        }
        for link in LINKS {
            assert_eq!(Link::named(link.name), Ok(link));
            assert!(link.calibrated_bytes_per_second <= link.ceiling_bytes_per_second, "{link:?}");
            assert!(link.calibrated_bytes_per_second > 0.5 * link.ceiling_bytes_per_second, "{link:?}");
        }
        assert!(Gpu::named("h900").unwrap_err().to_string().contains("there are a100-40gb-sxm"));
        assert!(Link::named("tape").unwrap_err().to_string().contains("NAME=SPEED"));
    }
}
