//! Turns rows into samples. [`crate::context`] assembles prompts that were logged in parts. A row
//! whose context is lost is dropped with a code, and so is one without a valid signature or with
//! sampling that a caller steered or that cannot be computed again. A row whose parent may still
//! arrive, or whose object store is unavailable, waits.

use std::collections::BTreeMap;
use std::panic::resume_unwind;
use std::sync::Arc;

use crate::context::{Broken, Error, ExpertPayloads, Lineages};
use event_log::payload::{Experts, Store};
use model::router::Routing;
use sqlx::PgConnection;
use tokio::task::JoinError;
use uuid::Uuid;

use super::row::Row;
use super::{Coded, provenance};
use crate::sample::{ModelLimits, Routed, Sample};

/// The code of constrained answers whose masks nobody may use, or knows. Samplers say it too.
const CONSTRAINED: &str = "constrained_sampling";

/// Rows that became samples, and rows that never will. Other rows wait.
#[derive(Debug, Default)]
pub struct Assembled {
    pub samples: Vec<Sample>,
    pub broken: Coded,
    /// The store of payloads did not answer, so rows wait that need it.
    pub unavailable: Option<Error>,
    /// Rows that wait for a parent which may still arrive.
    pub orphans: usize,
}

/// Rows with everything that the tables know of them. Payloads are not read yet.
pub(super) struct Stored {
    rows: Vec<Row>,
    lineages: Option<Lineages>,
    experts: Option<ExpertPayloads>,
}

impl Stored {
    pub async fn read(connection: &mut PgConnection, rows: Vec<Row>) -> Result<Self, sqlx::Error> {
        let ids = |filter: fn(&Row) -> bool| -> Vec<Uuid> {
            let rows = rows.iter().filter(|row| filter(row));
            rows.map(|row| row.id).collect()
        };
        let (in_parts, routed) = (ids(|row| row.in_parts), ids(|row| row.routed));
        let lineages = match in_parts.is_empty() {
            true => None,
            false => available(Lineages::read(connection, &in_parts).await, &mut None)?,
        };
        let experts = match routed.is_empty() {
            true => None,
            false => available(ExpertPayloads::read(connection, &routed).await, &mut None)?,
        };
        Ok(Stored {
            rows,
            lineages,
            experts,
        })
    }

    /// Whether the object store has parts of them.
    pub fn needs_payloads(&self) -> bool {
        self.lineages.is_some() || self.experts.is_some()
    }

    /// Without `payloads`, rows that need them wait.
    pub async fn assemble(self, payloads: Option<&Store>, limits: &ModelLimits) -> Result<Assembled, sqlx::Error> {
        let tokens_max = usize::try_from(limits.context).unwrap_or(0);
        let mut unavailable = None;
        let prompts = match self.lineages.as_ref().zip(payloads) {
            None => None,
            Some((lineages, payloads)) => available(lineages.prompts(payloads, tokens_max).await, &mut unavailable)?,
        };
        let experts = match self.experts.as_ref().zip(payloads) {
            None => None,
            Some((experts, payloads)) => available(experts.experts(payloads).await, &mut unavailable)?,
        };
        let (rows, limits) = (self.rows, limits.clone());
        // only the masks of rollouts take time to compute, and reading a tokenizer
        let is_slow = |row: &Row| !row.production && row.is_constrained() || row.kept_characters.is_some();
        let is_slow = rows.iter().any(is_slow);
        let work = move || assemble(rows, prompts.unwrap_or_default(), experts.unwrap_or_default(), &limits);
        let assembled = match is_slow {
            false => work(),
            true => match tokio::task::spawn_blocking(work)
                .await
                .map_err(JoinError::try_into_panic)
            {
                Ok(assembled) => assembled,
                Err(Ok(panic)) => resume_unwind(panic),
                // the process ends
                Err(Err(_)) => Assembled::default(),
            },
        };
        Ok(Assembled {
            unavailable,
            ..assembled
        })
    }
}

fn assemble(
    rows: Vec<Row>,
    mut prompts: BTreeMap<Uuid, Result<Vec<u32>, Broken>>,
    mut experts: BTreeMap<Uuid, Result<Experts, Broken>>,
    limits: &ModelLimits,
) -> Assembled {
    let mut assembled = Assembled::default();
    for mut row in rows {
        let constraint = row.take_constraint();
        let (id, young, in_parts, routed) = (row.id, row.young, row.in_parts, row.routed);
        let (production, kept_characters, stopped) = (row.production, row.kept_characters, row.stopped);
        if let Err(code) = provenance::check(&row) {
            assembled.broken.entry(code.into()).or_default().push(id);
            continue;
        }
        let mut sample = row.into_sample(limits.decline);
        // a run chooses the sampling of its own rollouts
        if let Some(why) = sample.untrainable().filter(|_| production) {
            assembled.broken.entry(why.into()).or_default().push(id);
            continue;
        }
        // a grammar makes text likely, as a bias does; and another engine's masks are its own
        if constraint.is_some() && (production || sample.engine.is_some()) {
            assembled.broken.entry(CONSTRAINED.into()).or_default().push(id);
            continue;
        }
        let mut broken = None;
        if in_parts {
            match prompts.remove(&id) {
                Some(Ok(prompt)) => sample.prompt = prompt,
                Some(Err(Broken::ParentMissing)) if young => {
                    assembled.orphans += 1;
                    continue;
                }
                Some(Err(why)) => broken = Some(why.code()),
                None => continue,
            }
            broken = broken.or_else(|| refuse(&sample, limits));
        }
        if routed && broken.is_none() {
            let Some(logged) = experts.remove(&id) else { continue };
            match logged.and_then(|logged| routing(&logged, sample.input_len(), limits)) {
                Ok(routing) => sample.experts = routing.map(Arc::new),
                // the trainer then chooses the experts itself, and the parity guard checks the
                // result
                Err(Broken::PayloadMissing) => {}
                Err(why) => broken = Some(why.code()),
            }
        }
        if let Some(characters) = kept_characters {
            sample.kept = limits
                .grammars
                .kept(&sample.tokens, stopped, characters, sample.reward > 0.0);
        }
        if let (Some(constraint), None) = (constraint, broken) {
            match limits.grammars.masks(&constraint, &sample.tokens) {
                Ok(masks) => sample.constrain(masks),
                Err(why) => broken = Some(why.code()),
            }
        }
        match broken {
            None => assembled.samples.push(sample),
            Some(code) => assembled.broken.entry(code.into()).or_default().push(id),
        }
    }
    assembled
}

/// If the object store is unavailable there is nothing, so every row waits.
fn available<T>(read: Result<T, Error>, unavailable: &mut Option<Error>) -> Result<Option<T>, sqlx::Error> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(Error::Database(error)) => Err(error),
        Err(error) => {
            let why = std::error::Error::source(&error).map(ToString::to_string);
            tracing::warn!(why, "trajectories wait for the store of payloads");
            *unavailable = Some(error);
            Ok(None)
        }
    }
}

/// Checks that need the whole prompt; `faults.sql` has checked the rest.
fn refuse(sample: &Sample, limits: &ModelLimits) -> Option<&'static str> {
    let tokens = sample.prompt.len() + sample.tokens.len();
    if sample.prompt.is_empty() {
        return Some("empty");
    }
    if i64::try_from(tokens).is_ok_and(|tokens| tokens > limits.context) {
        return Some("longer_than_context");
    }
    let outside = |id: &u32| i64::from(*id) >= limits.vocabulary;
    sample.prompt.iter().any(outside).then_some("token_outside_vocabulary")
}

/// Logged experts as the model replays them: by layer, of the first `tokens` tokens, each token's
/// experts ascending, which is the order in which their results are added. `None`: our trainer does not compute the
/// model.
fn routing(logged: &Experts, tokens: usize, limits: &ModelLimits) -> Result<Option<Routing>, Broken> {
    let experts = match &limits.experts {
        Routed::Known(experts) => experts,
        Routed::Unknown => {
            let covers = logged.first == 0 && logged.tokens() >= tokens;
            return covers.then_some(None).ok_or(Broken::ExpertsDiffer);
        }
        Routed::Dense => return Err(Broken::ExpertsDiffer),
    };
    let layers: Vec<i64> = (0..)
        .zip(&experts.layers)
        .filter(|(_, routes)| **routes)
        .map(|(layer, _)| layer)
        .collect();
    let (per_layer, of_logged) = (usize::from(logged.per_layer), usize::from(logged.layers));
    // engines elsewhere may log the layers without experts too
    let place = |nth: usize| {
        if of_logged == layers.len() {
            nth
        } else {
            layers[nth] as usize
        }
    };
    let fits = logged.first == 0
        && logged.tokens() >= tokens
        && (of_logged == layers.len() || of_logged == experts.layers.len())
        && i64::from(logged.per_layer) == experts.per_token
        && i64::from(logged.experts) == experts.count;
    if !fits {
        return Err(Broken::ExpertsDiffer);
    }
    let mut routing = Routing::default();
    for (at, layer) in layers.iter().enumerate() {
        let mut ids = Vec::with_capacity(tokens * per_layer);
        for token in logged.ids.chunks_exact(of_logged * per_layer).take(tokens) {
            let mut of_layer: Vec<u32> = token[place(at) * per_layer..][..per_layer]
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
    Ok(Some(routing))
}

#[cfg(test)]
mod tests {
    use super::*;
    use model::config::{Experts as Mixture, Scoring};

    fn limits() -> ModelLimits {
        ModelLimits {
            experts: Routed::Known(Mixture {
                count: 6,
                per_token: 2,
                intermediate_size: 1,
                normalize: true,
                shared: 0,
                scoring: Scoring::Softmax,
                layers: vec![false, true, true],
            }),
            ..ModelLimits::default()
        }
    }

    fn logged(ids: &[u16]) -> Experts {
        Experts {
            first: 0,
            layers: 2,
            per_layer: 2,
            experts: 6,
            ids: ids.to_vec(),
        }
    }

    #[test]
    fn logged_experts_are_grouped_by_layer_and_sorted() {
        let routing = routing(&logged(&[3, 1, 0, 5, 2, 4, 1, 0, 5, 4, 3, 2]), 2, &limits());
        let routing = routing.unwrap().unwrap();
        assert_eq!(routing.layers(), [(1, vec![1, 3, 2, 4]), (2, vec![0, 5, 0, 1])]);
    }

    #[test]
    fn experts_of_another_model_are_refused() {
        let good = logged(&[3, 1, 0, 5]);
        assert!(routing(&good, 1, &limits()).is_ok());
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
            logged(&[3, 3, 0, 5]),
        ] {
            assert_eq!(routing(&bad, 1, &limits()), Err(Broken::ExpertsDiffer));
        }
        assert_eq!(
            routing(&good, 2, &limits()),
            Err(Broken::ExpertsDiffer),
            "too few tokens"
        );
        assert_eq!(
            routing(&good, 1, &ModelLimits::default()),
            Err(Broken::ExpertsDiffer),
            "dense"
        );
        let unknown = ModelLimits {
            experts: Routed::Unknown,
            ..ModelLimits::default()
        };
        assert_eq!(routing(&good, 1, &unknown), Ok(None));
    }
}
