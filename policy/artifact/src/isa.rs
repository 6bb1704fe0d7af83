//! Which SIMD instructions this machine has. Every choice computes the same bits.

use std::sync::OnceLock;

/// Which instructions compute. All of them give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    Portable,
    Avx2,
    Avx512,
    /// With AVX512-BF16, for products of bf16.
    Avx512Bf16,
}

impl Isa {
    /// The fastest that this machine has. `SPRINGTIDE_ISA` (`portable`, `avx2`, `avx512`, `avx512bf16`) asks for less, to compare.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let available = Self::available();
            let best = available.last().copied().unwrap_or(Isa::Portable);
            let Ok(asked) = std::env::var("SPRINGTIDE_ISA") else {
                return best;
            };
            let named = |isa: &Isa| format!("{isa:?}").eq_ignore_ascii_case(&asked);
            available.iter().copied().find(named).unwrap_or_else(|| {
                tracing::warn!(
                    asked,
                    ?available,
                    "SPRINGTIDE_ISA names none of what this machine has, and is ignored"
                );
                best
            })
        })
    }

    /// Those that this machine can run, slowest first.
    pub fn available() -> Vec<Self> {
        let mut available = vec![Isa::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                available.push(Isa::Avx2);
                if is_x86_feature_detected!("avx512f") {
                    available.push(Isa::Avx512);
                    if is_x86_feature_detected!("avx512bf16") {
                        available.push(Isa::Avx512Bf16);
                    }
                }
            }
        }
        available
    }
}
