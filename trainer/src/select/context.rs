//! From rows to samples: the prompts of turns that were logged in parts are put together by `ingest`; what cannot be is
//! dropped with its code, waits for a parent that may still come, or waits for an object store that is away.

use std::collections::BTreeMap;
use std::sync::Arc;

use ingest::context::{self, Broken, Error};
use ingest::payload::{Experts, Store};
use policy::router::Routing;
use sqlx::PgConnection;
use uuid::Uuid;

use super::{Row, Shape};
use crate::sample::Sample;

/// What became of rows.
#[derive(Debug, Default)]
pub struct Whole {
    pub samples: Vec<Sample>,
    /// Never to be put together: code → generations. What is in neither waits.
    pub broken: BTreeMap<&'static str, Vec<Uuid>>,
}

pub(super) async fn complete(
    connection: &mut PgConnection,
    payloads: &Store,
    rows: Vec<Row>,
    shape: &Shape,
) -> Result<Whole, sqlx::Error> {
    let of = |wanted: fn(&Row) -> bool| {
        rows.iter()
            .filter(|row| wanted(row))
            .map(|row| row.id)
            .collect::<Vec<_>>()
    };
    let (in_parts, routed) = (of(|row| row.in_parts), of(|row| row.routed));
    let tokens_max = usize::try_from(shape.context).unwrap_or(0);
    let mut prompts = match in_parts.is_empty() {
        true => BTreeMap::new(),
        false => found(context::prompts(connection, payloads, &in_parts, tokens_max).await)?,
    };
    let mut experts = match routed.is_empty() {
        true => BTreeMap::new(),
        false => found(context::experts(connection, payloads, &routed).await)?,
    };
    let mut whole = Whole::default();
    for row in rows {
        let (id, young, in_parts, routed) = (row.id, row.young, row.in_parts, row.routed);
        let mut sample = Sample::from(row);
        if in_parts {
            match prompts.remove(&id) {
                Some(Ok(prompt)) => sample.prompt = prompt,
                Some(Err(Broken::ParentMissing)) if young => continue,
                Some(Err(broken)) => {
                    whole.broken.entry(broken.code()).or_default().push(id);
                    continue;
                }
                None => continue,
            }
            if let Some(code) = refuse(&sample, shape) {
                whole.broken.entry(code).or_default().push(id);
                continue;
            }
        }
        if routed {
            let Some(told) = experts.remove(&id) else { continue };
            match told.and_then(|told| routing(&told, sample.input_len(), shape)) {
                Ok(routing) => sample.experts = Some(Arc::new(routing)),
                // the trainer's own choice will do, and parity judges it
                Err(Broken::PayloadMissing) => {}
                Err(broken) => {
                    whole.broken.entry(broken.code()).or_default().push(id);
                    continue;
                }
            }
        }
        whole.samples.push(sample);
    }
    Ok(whole)
}

/// Nothing, where the store is away: whoever is not in it waits.
fn found<T>(read: Result<BTreeMap<Uuid, T>, Error>) -> Result<BTreeMap<Uuid, T>, sqlx::Error> {
    match read {
        Ok(found) => Ok(found),
        Err(Error::Database(error)) => Err(error),
        Err(error) => {
            let error = anyhow::Error::new(error);
            tracing::warn!(
                error = format!("{error:#}"),
                "trajectories wait for the store of payloads"
            );
            Ok(BTreeMap::new())
        }
    }
}

/// The rules that the row alone could not be held against.
fn refuse(sample: &Sample, shape: &Shape) -> Option<&'static str> {
    let tokens = sample.prompt.len() + sample.tokens.len();
    if sample.prompt.is_empty() {
        return Some("empty");
    }
    if i64::try_from(tokens).is_ok_and(|tokens| tokens > shape.context) {
        return Some("longer_than_context");
    }
    let outside = |id: &u32| i64::from(*id) >= shape.vocabulary;
    sample.prompt.iter().any(outside).then_some("token_outside_vocabulary")
}

/// Logged experts as the model replays them: of the first `tokens` tokens, by layer, each token's in the order in which their
/// results are added.
fn routing(told: &Experts, tokens: usize, shape: &Shape) -> Result<Routing, Broken> {
    let experts = shape.experts.as_ref().ok_or(Broken::ExpertsDiffer)?;
    let layers: Vec<i64> = (0..)
        .zip(&experts.layers)
        .filter(|(_, routes)| **routes)
        .map(|(layer, _)| layer)
        .collect();
    let per_layer = usize::from(told.per_layer);
    let fits = told.first == 0
        && told.tokens() >= tokens
        && usize::from(told.layers) == layers.len()
        && i64::from(told.per_layer) == experts.per_token
        && i64::from(told.experts) == experts.count;
    if !fits {
        return Err(Broken::ExpertsDiffer);
    }
    let mut routing = Routing::default();
    for (at, layer) in layers.iter().enumerate() {
        let mut ids = Vec::with_capacity(tokens * per_layer);
        for token in told.ids.chunks_exact(layers.len() * per_layer).take(tokens) {
            let mut of_layer: Vec<u32> = token[at * per_layer..][..per_layer]
                .iter()
                .map(|&id| u32::from(id))
                .collect();
            of_layer.sort_unstable();
            if of_layer.windows(2).any(|pair| pair[0] == pair[1]) {
                return Err(Broken::ExpertsDiffer);
            }
            ids.extend(of_layer);
        }
        routing.record(*layer, ids);
    }
    Ok(routing)
}

#[cfg(test)]
mod tests {
    use super::*;
    use policy::config::{Experts as Mixture, Scoring};

    fn shape() -> Shape {
        Shape {
            experts: Some(Mixture {
                count: 6,
                per_token: 2,
                intermediate_size: 1,
                normalise: true,
                shared: 0,
                scoring: Scoring::Softmax,
                layers: vec![false, true, true],
            }),
            ..Shape::default()
        }
    }

    fn told(ids: &[u16]) -> Experts {
        Experts {
            first: 0,
            layers: 2,
            per_layer: 2,
            experts: 6,
            ids: ids.to_vec(),
        }
    }

    #[test]
    fn logged_experts_go_by_layer_and_ascend() {
        let routing = routing(&told(&[3, 1, 0, 5, 2, 4, 1, 0, 5, 4, 3, 2]), 2, &shape()).unwrap();
        assert_eq!(routing.layers(), [(1, vec![1, 3, 2, 4]), (2, vec![0, 5, 0, 1])]);
    }

    #[test]
    fn experts_of_another_model_are_refused() {
        let good = told(&[3, 1, 0, 5]);
        assert!(routing(&good, 1, &shape()).is_ok());
        for bad in [
            Experts {
                first: 1,
                ..good.clone()
            },
            Experts {
                experts: 8,
                ..good.clone()
            },
            Experts {
                layers: 1,
                per_layer: 4,
                ..good.clone()
            },
            told(&[3, 3, 0, 5]),
        ] {
            assert_eq!(routing(&bad, 1, &shape()), Err(Broken::ExpertsDiffer));
        }
        assert_eq!(
            routing(&good, 2, &shape()),
            Err(Broken::ExpertsDiffer),
            "too few tokens"
        );
        assert_eq!(
            routing(&good, 1, &Shape::default()),
            Err(Broken::ExpertsDiffer),
            "dense"
        );
    }
}
