//! What one worker of an engine holds of a version: which part of which tensor lies where in its memory. A
//! patch becomes positions there, and a part's digest shows what it holds.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, BTreeSet};

use super::{Contents, Error, Patch, Row, written};
use crate::checkpoint::Checkpoint;
use crate::tensor::{TensorData, weight_bytes};

const AXES_MAX: usize = 16;

/// A part of a tensor in a worker's memory. All places and distances are counted in weights.
///
/// The weight with the indices `i` on the part's axes is in the tensor at `first + Σ i·there`, and in memory at
/// `at + Σ i·here`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LocalPart {
    pub tensor: String,
    pub first: usize,
    /// Of each axis: size, `there`, `here`. The largest `there` first.
    pub axes: Vec<(usize, usize, usize)>,
    pub at: usize,
    /// Size of the memory in which it lies, which may have other parts too.
    pub memory: usize,
}

/// What a worker says that it holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct HeldPart {
    #[serde(flatten)]
    pub part: LocalPart,
    /// [`LocalPart::digest`] of what is in its memory.
    pub sha256: String,
}

/// Names of the tensors of which other weights are held than `checkpoint` has.
pub fn wrongly_held(held: &[HeldPart], checkpoint: &Checkpoint) -> BTreeSet<String> {
    let wrong = held.par_iter().filter(|HeldPart { part, sha256 }| {
        let tensor = checkpoint.tensors.get(&part.tensor);
        let digest = tensor.and_then(|tensor| part.digest(tensor).ok());
        digest.as_ref() != Some(sha256)
    });
    wrong.map(|held| held.part.tensor.clone()).collect()
}

impl LocalPart {
    /// Weights that it has.
    pub fn weights(&self) -> usize {
        self.axes.iter().fold(1, |weights, axis| weights.saturating_mul(axis.0))
    }

    /// Its first and last place, from `start` on.
    fn ends(&self, start: usize, distance: impl Fn(&(usize, usize, usize)) -> usize) -> Option<(usize, usize)> {
        let reach = |sum: usize, axis: &(usize, usize, usize)| {
            let steps = axis.0.checked_sub(1)?;
            sum.checked_add(steps.checked_mul(distance(axis))?)
        };
        Some((start, self.axes.iter().try_fold(start, reach)?))
    }

    fn in_tensor(&self) -> Option<(usize, usize)> {
        self.ends(self.first, |axis| axis.1)
    }

    /// Fails unless it lies in a tensor of so many weights and in its memory, and has no weight twice.
    pub fn check(&self, elements: usize) -> Result<(), Error> {
        let inside = |ends: Option<(usize, usize)>, size| ends.is_some_and(|(_, last)| last < size);
        // an axis begins beyond the last weight of those within it
        let within = self.axes.iter().rev().try_fold(1_usize, |within, &(size, there, _)| {
            (there >= within).then(|| there.checked_mul(size)).flatten()
        });
        let fits = self.axes.len() <= AXES_MAX
            && within.is_some()
            && inside(self.in_tensor(), elements)
            && inside(self.ends(self.at, |axis| axis.2), self.memory);
        match fits {
            true => Ok(()),
            false => Err(Error::Part(format!(
                "{self:?} does not lie in a tensor of {elements} weights"
            ))),
        }
    }

    /// Where a weight of the tensor is in memory.
    fn position(&self, index: usize) -> Option<usize> {
        let mut rest = index.checked_sub(self.first)?;
        let mut position = self.at;
        for &(size, there, here) in &self.axes {
            let step = rest / there;
            if step >= size {
                return None;
            }
            position += step * here;
            rest -= step * there;
        }
        (rest == 0).then_some(position)
    }

    /// SHA-256 of its weights in the tensor's order, lowercase hex.
    ///
    /// # Errors
    /// If it does not lie in the tensor.
    pub fn digest(&self, tensor: &TensorData) -> Result<String, Error> {
        let width = weight_bytes(tensor.dtype);
        self.check(tensor.bytes.len() / width)?;
        let mut hasher = Sha256::new();
        self.hash(&tensor.bytes, width, self.first, &self.axes, &mut hasher);
        Ok(hex::encode(hasher.finalize()))
    }

    fn hash(&self, bytes: &[u8], width: usize, at: usize, axes: &[(usize, usize, usize)], hasher: &mut Sha256) {
        let run: usize = axes.iter().map(|axis| axis.0).product();
        // the axes lie one in the other without gaps
        let mut dense = 1;
        let is_run = axes.iter().rev().all(|&(size, there, _)| {
            let fits = there == dense;
            dense *= size;
            fits
        });
        match axes {
            [(size, there, _), inner @ ..] if !is_run => {
                for step in 0..*size {
                    self.hash(bytes, width, at + step * there, inner, hasher);
                }
            }
            _ => hasher.update(&bytes[at * width..(at + run) * width]),
        }
    }
}

impl Contents {
    /// The patch of one worker: what of this one lies in its parts. Its tensors are named by the parts' numbers,
    /// from 0 on, and have the shapes of their memories.
    ///
    /// # Errors
    /// If a part does not lie in its tensor.
    pub fn of_worker(&self, parts: &[LocalPart]) -> Result<Patch, Error> {
        let mut of_tensor: BTreeMap<&str, Vec<(usize, &LocalPart)>> = BTreeMap::new();
        for (number, part) in parts.iter().enumerate() {
            if self.tensors.contains_key(&part.tensor) {
                of_tensor.entry(&part.tensor).or_default().push((number, part));
            }
        }
        let rows = of_tensor.into_par_iter().map(|(name, parts)| {
            let changes = &self.tensors[name];
            let (indices, width) = (
                changes.indices().collect::<Vec<_>>(),
                weight_bytes(changes.values.dtype),
            );
            let rows = parts.into_iter().map(|(number, part)| {
                part.check(changes.shape.iter().product())?;
                let (first, last) = part.in_tensor().unwrap_or_default();
                let some =
                    indices.partition_point(|&index| index < first)..indices.partition_point(|&index| index <= last);
                let found = some.filter_map(|nth| Some((part.position(indices[nth])?, nth)));
                let mut found: Vec<(usize, usize)> = found.collect();
                found.sort_unstable();
                let mut row = Row::new(number.to_string(), vec![part.memory], changes.values.dtype);
                for (position, nth) in found {
                    row.push(position, &changes.values.bytes[nth * width..][..width])?;
                }
                Ok(row)
            });
            rows.collect::<Result<Vec<Row>, Error>>()
        });
        let rows = rows.collect::<Result<Vec<_>, Error>>()?;
        written(self.from, self.to, rows.into_iter().flatten())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::patch::between;
    use crate::patch::tests::checkpoint;
    use bytes::Bytes;

    /// Rows of two weights.
    fn part(first: usize, axes: &[(usize, usize, usize)], at: usize, memory: usize) -> LocalPart {
        LocalPart {
            tensor: "a".into(),
            first,
            axes: axes.to_vec(),
            at,
            memory,
        }
    }

    #[test]
    fn a_worker_gets_the_positions_of_its_parts_alone() {
        // [2, 4], of which the first and the last weight of each row change
        let old = checkpoint(&[("a", &[0, 1, 2, 3, 4, 5, 6, 7]), ("b", &[1, 2])]);
        let new = checkpoint(&[("a", &[9, 1, 2, 8, 7, 5, 6, 6]), ("b", &[1, 2])]);
        let patch = Contents::from_bytes(&between(&old, &new).unwrap().file.into()).unwrap();
        let parts = [
            // the second half of each row, below another part
            part(2, &[(2, 4, 2), (2, 1, 1)], 3, 7),
            // transposed
            part(0, &[(2, 4, 1), (4, 1, 2)], 0, 8),
            LocalPart {
                tensor: "b".into(),
                ..part(0, &[(2, 1, 1)], 0, 2)
            },
        ];
        let own = patch.of_worker(&parts).unwrap();
        assert_eq!(own.weights, 6);
        let own = Contents::from_bytes(&Bytes::from(own.file)).unwrap();
        assert_eq!((own.from, own.to), (old.root(), new.root()));
        assert_eq!(own.tensors.keys().collect::<Vec<_>>(), ["0", "1"]);
        let found = |name: &str| {
            let values = own.tensors[name].values.bytes.as_chunks::<2>().0.iter();
            let values = values.map(|value| u16::from_le_bytes(*value));
            own.tensors[name].indices().zip(values).collect::<Vec<_>>()
        };
        assert_eq!(found("0"), [(4, 8), (6, 6)]);
        assert_eq!(found("1"), [(0, 9), (1, 7), (6, 8), (7, 6)]);
        for wrong in [
            part(0, &[(9, 1, 1)], 0, 9),
            part(7, &[(2, 1, 1)], 0, 2),
            part(0, &[(8, 1, 1)], 1, 8),
            part(0, &[(2, 1, 1), (2, 1, 2)], 0, 9),
            part(0, &[(0, 1, 1)], 0, 9),
            part(0, &[(2, usize::MAX, 1)], 0, 9),
        ] {
            assert!(
                matches!(patch.of_worker(std::slice::from_ref(&wrong)), Err(Error::Part(_))),
                "{wrong:?}"
            );
        }
    }

    #[test]
    fn eight_workers_together_get_each_changed_weight_once() {
        let values: Vec<u16> = (0..64).collect();
        let changed: Vec<u16> = values.iter().map(|value| value ^ (value % 3)).collect();
        let (old, new) = (checkpoint(&[("a", &values)]), checkpoint(&[("a", &changed)]));
        let patch = Contents::from_bytes(&between(&old, &new).unwrap().file.into()).unwrap();
        // columns of [2, 32]
        let workers = (0..8).map(|worker| part(4 * worker, &[(2, 32, 4), (4, 1, 1)], 0, 8));
        let mut held = vec![0; 64];
        for worker in workers {
            let own = patch.of_worker(std::slice::from_ref(&worker)).unwrap();
            let own = Contents::from_bytes(&Bytes::from(own.file)).unwrap();
            for position in own.tensors["0"].indices() {
                held[worker.first + position / 4 * 32 + position % 4] += 1;
            }
        }
        let expected = values.iter().zip(&changed).map(|(old, new)| i32::from(old != new));
        assert_eq!(held, expected.collect::<Vec<_>>());
    }

    #[test]
    fn a_parts_digest_is_that_of_its_weights_in_the_tensors_order() {
        let tensor = &checkpoint(&[("a", &[0, 1, 2, 3, 4, 5, 6, 7])]).tensors["a"];
        let of = |values: &[u16]| {
            let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
            hex::encode(Sha256::digest(&bytes))
        };
        for (part, values) in [
            (part(0, &[(2, 4, 4), (4, 1, 1)], 0, 8), &[0, 1, 2, 3, 4, 5, 6, 7][..]),
            (part(0, &[(2, 4, 1), (4, 1, 2)], 0, 8), &[0, 1, 2, 3, 4, 5, 6, 7]),
            (part(2, &[(2, 4, 2), (2, 1, 1)], 3, 7), &[2, 3, 6, 7]),
            (part(1, &[(4, 2, 1)], 0, 4), &[1, 3, 5, 7]),
            (part(5, &[], 0, 1), &[5]),
        ] {
            assert_eq!(part.digest(tensor).unwrap(), of(values), "{part:?}");
        }
        assert!(part(7, &[(2, 1, 1)], 0, 2).digest(tensor).is_err());
    }
}
