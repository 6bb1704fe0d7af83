//! Random draws that depend only on a label and a few numbers, not on the order of calls, the
//! platform or a library's version. All arms and every rerun therefore meet the same pauses.
//! Not for secrets.

use blake3::{Hasher, OutputReader};

/// An endless stream of draws, the same for the same label and key.
#[derive(Debug)]
pub struct Draws(OutputReader);

impl Draws {
    /// `label` names what is drawn; `key` says which one, e.g. `[seed, user, pause]`.
    pub fn new(label: &str, key: &[u64]) -> Self {
        let mut hasher = Hasher::new_derive_key(label);
        for part in key {
            hasher.update(&part.to_le_bytes());
        }
        Self(hasher.finalize_xof())
    }

    fn bits(&mut self) -> u64 {
        let mut bytes = [0; 8];
        self.0.fill(&mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Uniform on (0, 1]. Never 0, so its logarithm is finite.
    pub fn unit(&mut self) -> f64 {
        ((self.bits() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Uniform on 0..n, n ≥ 1 (Lemire's multiplication; the bias is below n / 2⁶⁴).
    pub fn below(&mut self, n: usize) -> usize {
        debug_assert!(n > 0);
        ((u128::from(self.bits()) * n as u128) >> 64) as usize
    }

    /// A seed for a sampler.
    pub fn seed(&mut self) -> u64 {
        self.below(1 << 53) as u64
    }

    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() <= probability
    }

    /// Exponential with mean 1.
    pub fn exponential(&mut self) -> f64 {
        -self.unit().ln()
    }

    /// Standard normal (Box–Muller, one of the pair).
    pub fn normal(&mut self) -> f64 {
        let radius = (2.0 * self.exponential()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_key_gives_the_same_draws_and_another_key_gives_others() {
        let draws = |key: &[u64]| {
            let mut draws = Draws::new("test", key);
            [draws.unit(), draws.unit(), draws.unit()]
        };
        assert_eq!(draws(&[1, 2, 3]), draws(&[1, 2, 3]));
        assert_ne!(draws(&[1, 2, 3]), draws(&[1, 3, 2]));
        assert_ne!(Draws::new("a", &[1]).unit(), Draws::new("b", &[1]).unit());
    }

    #[test]
    fn draws_have_the_moments_of_their_distributions() {
        let mut draws = Draws::new("test", &[7]);
        let n = 40_000;
        let mut mean = [0.0; 3];
        let mut square = 0.0;
        let mut counts = [0usize; 5];
        for _ in 0..n {
            let normal = draws.normal();
            for (sum, x) in mean.iter_mut().zip([draws.unit(), draws.exponential(), normal]) {
                *sum += x / n as f64;
            }
            square += normal * normal / n as f64;
            counts[draws.below(5)] += 1;
        }
        assert!((mean[0] - 0.5).abs() < 0.01, "uniform mean {}", mean[0]);
        assert!((mean[1] - 1.0).abs() < 0.03, "exponential mean {}", mean[1]);
        assert!(mean[2].abs() < 0.03, "normal mean {}", mean[2]);
        assert!((square - 1.0).abs() < 0.04, "normal variance {square}");
        assert!(counts.iter().all(|&count| count.abs_diff(n / 5) < 400), "{counts:?}");
    }
}
