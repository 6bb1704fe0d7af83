//! Which SIMD instructions this machine has. Every choice computes the same bits.

use std::sync::OnceLock;

/// The name of an instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// Plain Rust.
    Portable,
    /// AVX2 with FMA.
    Avx2,
    /// AVX-512 F.
    Avx512,
    /// AVX-512 with AVX512-BF16, for products of bf16.
    Avx512Bf16,
}

/// Proof that this machine has an instruction set. Only detection makes one, so safe functions may
/// run the instructions that it names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Isa(InstructionSet);

impl Isa {
    pub const PORTABLE: Isa = Isa(InstructionSet::Portable);

    pub fn set(self) -> InstructionSet {
        self.0
    }

    /// The fastest on this machine. `SPRINGTIDE_ISA` (`portable`, `avx2`, `avx512`, `avx512bf16`)
    /// selects a slower one, for comparisons.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let available = Self::available();
            let best = available.last().copied().unwrap_or(Isa::PORTABLE);
            let Ok(asked) = std::env::var("SPRINGTIDE_ISA") else {
                return best;
            };
            let named = |isa: &Isa| format!("{isa:?}").eq_ignore_ascii_case(&asked);
            available.iter().copied().find(named).unwrap_or_else(|| {
                tracing::warn!(
                    asked,
                    ?available,
                    "ignored SPRINGTIDE_ISA: this machine has no such instruction set"
                );
                best
            })
        })
    }

    /// All on this machine, slowest first.
    pub fn available() -> Vec<Self> {
        let mut available = vec![Isa::PORTABLE];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
                available.push(Isa(InstructionSet::Avx2));
                if is_x86_feature_detected!("avx512f") {
                    available.push(Isa(InstructionSet::Avx512));
                    if is_x86_feature_detected!("avx512bf16") {
                        available.push(Isa(InstructionSet::Avx512Bf16));
                    }
                }
            }
        }
        available
    }
}

impl std::fmt::Debug for Isa {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}
