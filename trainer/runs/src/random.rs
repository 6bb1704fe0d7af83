//! Random numbers with one integer as their whole state, which a run state can store (SplitMix64,
//! Steele et al. 2014). They choose tasks. Serving samples tokens with its own generator.

/// A generator. Equal states give equal sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Random(pub u64);

impl Random {
    /// Uniform over all values.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `count` different indices below `len`, all of them if there are fewer.
    pub fn choose(&mut self, len: usize, count: usize) -> Vec<usize> {
        let mut indices: Vec<usize> = (0..len).collect();
        let count = count.min(len);
        for i in 0..count {
            let j = i + (self.draw() % (len - i) as u64) as usize;
            indices.swap(i, j);
        }
        indices.truncate(count);
        indices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sequence_is_the_published_one() {
        // first outputs for seed 1234567 of the reference implementation
        let mut random = Random(1_234_567);
        assert_eq!(random.draw(), 6_457_827_717_110_365_317);
        assert_eq!(random.draw(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn chosen_indices_are_different_and_reproducible() {
        let mut chosen = Random(9).choose(20, 8);
        assert_eq!(chosen, Random(9).choose(20, 8));
        chosen.sort_unstable();
        chosen.dedup();
        assert_eq!(chosen.len(), 8);
        assert!(chosen.iter().all(|&i| i < 20));
        assert_eq!(Random(1).choose(3, 8).len(), 3);
    }
}
