//! The choice of experts, for both backends. Pure functions.

use crate::config::{Experts, Scoring};

/// The chosen experts of one token, ascending.
///
/// `scores` has one value per expert: the router's logits for a softmax, which has the same order,
/// and sigmoid(logit) + bias for a sigmoid. The lower id wins a tie.
pub fn choose(scores: &[f32], experts: &Experts) -> Vec<u32> {
    let by_score = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
    let mut ids: Vec<u32> = match experts.scoring {
        Scoring::Softmax => (0..scores.len() as u32).collect(),
        Scoring::Sigmoid { groups, top_groups, .. } => {
            let size = scores.len() / groups.max(1) as usize;
            let worth = |group: usize| {
                let mut best = [f32::NEG_INFINITY; 2];
                for &score in &scores[group * size..][..size] {
                    if score > best[0] {
                        best = [score, best[0]];
                    } else if score > best[1] {
                        best[1] = score;
                    }
                }
                if size == 1 { best[0] } else { best[0] + best[1] }
            };
            let worths: Vec<f32> = (0..groups as usize).map(worth).collect();
            let mut order: Vec<usize> = (0..groups as usize).collect();
            order.sort_by(|&a, &b| worths[b].total_cmp(&worths[a]).then(a.cmp(&b)));
            let top = order.into_iter().take(top_groups as usize);
            top.flat_map(|group| (group * size) as u32..((group + 1) * size) as u32)
                .collect()
        }
    };
    ids.sort_by(by_score);
    ids.truncate(experts.per_token as usize);
    ids.sort_unstable();
    ids
}

/// The experts of every layer and row of one pass. Samplers record them and trainers replay them.
///
/// Dense layers have no entry. In the last layer, rows without logits hold 0, 1, … ([`spread`]).
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Routing {
    /// Layer and `[rows · per_token]`, layers ascending.
    layers: Vec<(i64, Vec<u32>)>,
}

/// Extends the choices for `logit_rows`, the only rows that the last layer computes, to all `rows`.
/// The other rows get 0, 1, …, because no result of theirs is used.
pub fn spread(chosen: &[u32], per_token: usize, logit_rows: &[usize], rows: usize) -> Vec<u32> {
    let mut all: Vec<u32> = (0..rows).flat_map(|_| 0..per_token as u32).collect();
    for (chosen, &row) in chosen.chunks_exact(per_token.max(1)).zip(logit_rows) {
        all[row * per_token..][..per_token].copy_from_slice(chosen);
    }
    all
}

/// The choices of `logit_rows` among one layer's choices for all rows. The reverse of [`spread`].
pub fn pick(all: &[u32], per_token: usize, logit_rows: &[usize]) -> Vec<u32> {
    let of = |&row: &usize| &all[row * per_token..][..per_token];
    logit_rows.iter().flat_map(of).copied().collect()
}

/// Why a recorded routing cannot be replayed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("the recorded routing has {recorded} where layer {layer} with {wanted} choices is next")]
pub struct Mismatch {
    pub layer: i64,
    pub wanted: usize,
    pub recorded: String,
}

/// How often a router would have chosen other experts than were replayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Disagreement {
    pub tokens: usize,
    /// Those for which at least one expert differs.
    pub other: usize,
}

impl Disagreement {
    /// Of one layer's choices, `[rows · per_token]` each, in any order within a row.
    pub fn of(replayed: &[u32], own: &[u32], per_token: usize) -> Self {
        let rows = replayed.chunks_exact(per_token).zip(own.chunks_exact(per_token));
        let other = rows.filter(|(replayed, own)| !own.iter().all(|expert| replayed.contains(expert)));
        Disagreement {
            tokens: replayed.len() / per_token.max(1),
            other: other.count(),
        }
    }

    pub fn add(&mut self, more: Self) {
        self.tokens += more.tokens;
        self.other += more.other;
    }
}

impl Routing {
    pub fn layers(&self) -> &[(i64, Vec<u32>)] {
        &self.layers
    }

    /// A layer's choices, `[rows · per_token]`. `None`: the layer has no experts.
    pub fn of_layer(&self, layer: i64) -> Option<&[u32]> {
        let found = self.layers.iter().find(|(at, _)| *at == layer);
        found.map(|(_, experts)| experts.as_slice())
    }

    /// Adds the next layer's choices.
    pub fn record(&mut self, layer: i64, experts: Vec<u32>) {
        self.layers.push((layer, experts));
    }

    /// Returns the choices of `layer` and advances `next`.
    ///
    /// # Errors
    /// If the entry `next` is not this layer's, does not have `wanted` choices, or names an expert
    /// that is not below `count`.
    pub fn replay(&self, next: &mut usize, layer: i64, wanted: usize, count: i64) -> Result<Vec<u32>, Mismatch> {
        match self.layers.get(*next) {
            Some((at, experts)) if *at == layer && experts.iter().any(|&expert| i64::from(expert) >= count) => {
                Err(Mismatch {
                    layer,
                    wanted,
                    recorded: format!("an expert beyond the {count} that there are"),
                })
            }
            Some((at, experts)) if *at == layer && experts.len() == wanted => {
                *next += 1;
                Ok(experts.clone())
            }
            other => Err(Mismatch {
                layer,
                wanted,
                recorded: match other {
                    Some((at, experts)) => format!("layer {at} with {} choices", experts.len()),
                    None => "nothing more".into(),
                },
            }),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.layers.is_empty()
    }

    /// Splits the routing of a pass into parts of so many rows each. The parts have all its rows.
    pub fn split(&self, rows: impl Iterator<Item = usize> + Clone) -> Vec<Routing> {
        let all: usize = rows.clone().sum();
        let mut first = 0;
        let mut part = |rows: usize| {
            let of_layer = |(layer, experts): &(i64, Vec<u32>)| {
                let per_row = experts.len() / all.max(1);
                (*layer, experts[first * per_row..][..rows * per_row].to_vec())
            };
            let layers = self.layers.iter().map(of_layer).collect();
            first += rows;
            Routing { layers }
        };
        rows.map(&mut part).collect()
    }

    /// Appends the rows of a later pass, such as a decoded token's to its prompt's.
    ///
    /// # Errors
    /// If the passes do not have the same layers.
    pub fn append(&mut self, later: &Routing) -> Result<(), Mismatch> {
        if self.layers.is_empty() {
            *self = later.clone();
            return Ok(());
        }
        for (i, (layer, experts)) in later.layers.iter().enumerate() {
            match self.layers.get_mut(i) {
                Some((at, all)) if at == layer => all.extend(experts),
                other => {
                    return Err(Mismatch {
                        layer: *layer,
                        wanted: experts.len(),
                        recorded: other.map_or("nothing more".into(), |(at, _)| format!("layer {at}")),
                    });
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn experts(per_token: i64, scoring: Scoring) -> Experts {
        Experts {
            count: 6,
            per_token,
            intermediate_size: 1,
            normalize: true,
            shared: 0,
            scoring,
            layers: vec![true],
        }
    }

    #[test]
    fn a_softmax_router_takes_the_best_experts_and_breaks_ties_by_id() {
        let experts = experts(2, Scoring::Softmax);
        assert_eq!(choose(&[0.1, 0.9, 0.3, 0.9, 0.2, 0.0], &experts), [1, 3]);
        assert_eq!(choose(&[0.5, 0.9, 0.5, 0.5, 0.2, 0.0], &experts), [0, 1]);
    }

    #[test]
    fn a_grouped_router_looks_only_into_its_best_groups() {
        let scoring = Scoring::Sigmoid {
            groups: 3,
            top_groups: 1,
            scale: 1.0,
        };
        // groups 0.1 + 0.9, 0.6 + 0.7, 0.2 + 0.2: the best single expert is in a group that is not
        // kept
        assert_eq!(choose(&[0.1, 0.9, 0.6, 0.7, 0.2, 0.2], &experts(2, scoring)), [2, 3]);
    }

    #[test]
    fn a_replay_takes_each_layer_once_and_in_order() {
        let mut routing = Routing::default();
        routing.record(1, vec![0, 2]);
        routing.record(2, vec![1, 3]);
        let mut next = 0;
        assert_eq!(routing.replay(&mut next, 1, 2, 4).unwrap(), [0, 2]);
        assert_eq!(routing.replay(&mut next, 2, 2, 4).unwrap(), [1, 3]);
        let error = routing.replay(&mut next, 2, 2, 4).unwrap_err();
        assert!(error.to_string().contains("nothing more"), "{error}");
        let error = routing.replay(&mut 0, 2, 2, 4).unwrap_err();
        assert!(error.to_string().contains("layer 1 with 2 choices"), "{error}");
        assert!(routing.replay(&mut 0, 1, 4, 4).is_err());
        let error = routing.replay(&mut 0, 1, 2, 2).unwrap_err();
        assert!(error.to_string().contains("beyond the 2"), "{error}");
    }

    #[test]
    fn rows_without_logits_get_placeholder_experts() {
        let all = spread(&[4, 5, 1, 3], 2, &[1, 3], 4);
        assert_eq!(all, [0, 1, 4, 5, 0, 1, 1, 3]);
        assert_eq!(pick(&all, 2, &[1, 3]), [4, 5, 1, 3]);
    }

    #[test]
    fn a_pass_splits_into_parts_and_parts_append_to_a_pass() {
        let mut routing = Routing::default();
        routing.record(1, vec![0, 2, 1, 3, 0, 1]);
        routing.record(2, vec![4, 5, 0, 1, 2, 3]);
        let parts = routing.split([1, 2].into_iter());
        assert_eq!(parts[0].layers(), [(1, vec![0, 2]), (2, vec![4, 5])]);
        assert_eq!(parts[1].layers(), [(1, vec![1, 3, 0, 1]), (2, vec![0, 1, 2, 3])]);
        let mut all = parts[0].clone();
        all.append(&parts[1]).unwrap();
        assert_eq!(all, routing);
    }

    #[test]
    fn the_routings_of_a_prompt_and_its_continuation_become_one() {
        let mut all = Routing::default();
        let mut prompt = Routing::default();
        prompt.record(0, vec![0, 2, 1, 3]);
        let mut token = Routing::default();
        token.record(0, vec![4, 5]);
        all.append(&prompt).unwrap();
        all.append(&token).unwrap();
        assert_eq!(all.layers(), [(0, vec![0, 2, 1, 3, 4, 5])]);
        let mut other = Routing::default();
        other.record(1, vec![0, 1]);
        assert!(all.append(&other).is_err());
    }
}
