//! One generation as the trainer sees it: exactly the ids and log-probabilities that were logged,
//! never re-tokenized. It is a trajectory, or a turn of one.

use crate::grammar::{Grammars, Masks};
use event_log::event::Sampling;
use model::config::Experts;
use model::router::Routing;
use model::sampling::Params;
use std::sync::Arc;
use text::kept::Kept;
use uuid::Uuid;

/// A generation with the reward of its trajectory, ready for training.
#[derive(Debug, Clone, PartialEq)]
pub struct Sample {
    pub generation: Uuid,
    /// Whose request it answers: a user is a pair of tenant and key.
    pub tenant: String,
    pub user: String,
    /// Who sampled it.
    pub replica: String,
    /// The engine that computed it, such as `vllm`. `None`: our own.
    pub engine: Option<String>,
    /// The class of request that a baseline belongs to: its surface.
    pub class: String,
    /// The rollouts of one task; `None` in production.
    pub group: Option<String>,
    /// Its place in its episode. `None`: it is a trajectory of its own.
    pub turn: Option<Turn>,
    /// Serial of the oldest version that sampled any of its tokens.
    pub version: i64,
    /// How many steps the head is away from that version. 0: all tokens are the head's.
    pub staleness: usize,
    /// At least one id.
    pub prompt: Vec<u32>,
    /// Sampled ids including the stop token; at least one.
    pub tokens: Vec<u32>,
    /// log μ of each sampled token, nats.
    pub logprobs: Vec<f32>,
    /// Whether each sampled token is trained on.
    pub mask: Vec<bool>,
    /// Above 0.
    pub temperature: f32,
    /// `None`: sampled from the model's own distribution at that temperature.
    pub behavior: Option<Arc<Behavior>>,
    /// Logged experts of all tokens but the last. `None`: not logged, or a dense model.
    pub experts: Option<Arc<Routing>>,
    pub reward: f64,
    /// How much of it its user kept. `None`: not said, or no text. Only the loss `verdicts` reads it.
    pub kept: Option<Kept>,
    /// `tokens` are what its user typed instead of what was sampled, and this key sent it (nil: a dataset, or no key was
    /// needed): the loss takes them for right, and nobody's `logprobs` are compared.
    pub typed: Option<Uuid>,
    /// The decline token was masked; `logprobs` are of the distribution without it.
    pub suppressed: bool,
    /// Factor of its advantage, 0 or more, see [`crate::explore`]. Supervised runs set it to 1, and the loss
    /// `verdicts` sees only whether it is 0.
    pub weight: f64,
}

/// A turn of an episode that is one trajectory.
#[derive(Debug, Clone, PartialEq)]
pub struct Turn {
    /// Unique among the episodes of the tenant.
    pub episode: Uuid,
    /// Its place among the turns of the episode, from 0.
    pub index: usize,
    /// The own reward of every turn of the episode, also of those that are not trained on. `None`: the
    /// turn has none.
    pub rewards: Arc<[Option<f64>]>,
}

impl Turn {
    /// Its own reward.
    pub fn reward(&self) -> Option<f64> {
        self.rewards.get(self.index).copied().flatten()
    }
}

/// What has one reward.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trajectory {
    Generation(Uuid),
    Episode { tenant: String, id: Uuid },
}

impl Sample {
    /// The trajectory that it is, or is a turn of.
    pub fn trajectory(&self) -> Trajectory {
        match &self.turn {
            None => Trajectory::Generation(self.generation),
            Some(turn) => Trajectory::Episode {
                tenant: self.tenant.clone(),
                id: turn.episode,
            },
        }
    }

    /// Tokens that the model reads to score the sampled ones: all but the last.
    pub fn input_len(&self) -> usize {
        self.prompt.len() + self.tokens.len() - 1
    }

    /// Sampled tokens that are trained on.
    pub fn trained_tokens(&self) -> usize {
        self.mask.iter().filter(|&&m| m).count()
    }

    /// What its user typed in place of what was sampled, all of it trained on, and nothing of how that was sampled.
    /// `key` sent it.
    pub fn instead(self, tokens: Vec<u32>, key: Uuid) -> Self {
        Sample {
            logprobs: vec![0.0; tokens.len()], // nobody sampled it
            mask: vec![true; tokens.len()],
            tokens,
            temperature: 1.0,
            behavior: None,
            experts: None,
            kept: None,
            typed: Some(key),
            suppressed: false,
            weight: 1.0,
            ..self
        }
    }

    /// [`Params::untrainable`] of its sampling parameters.
    pub fn untrainable(&self) -> Option<&'static str> {
        let plain = || Params {
            temperature: self.temperature,
            ..Params::default()
        };
        match &self.behavior {
            Some(behavior) => behavior.params.untrainable(),
            None => plain().untrainable(),
        }
    }

    /// A grammar excluded ids.
    pub fn constrain(&mut self, masks: Masks) {
        let plain = || Behavior {
            params: Params {
                temperature: self.temperature,
                ..Params::default()
            },
            candidates: None,
            masks: None,
        };
        let behavior = self.behavior.take().map_or_else(plain, Arc::unwrap_or_clone);
        self.behavior = Some(Arc::new(Behavior {
            masks: Some(masks),
            ..behavior
        }));
    }

    /// A small sample for tests, also those of `trainer`.
    pub fn example() -> Self {
        Sample {
            generation: Uuid::now_v7(),
            tenant: "default".into(),
            user: "u".into(),
            replica: "r".into(),
            engine: None,
            class: "completion".into(),
            group: None,
            turn: None,
            version: 1,
            staleness: 0,
            prompt: vec![1, 2],
            tokens: vec![3],
            logprobs: vec![-1.0],
            mask: vec![true],
            temperature: 1.0,
            behavior: None,
            experts: None,
            reward: 0.0,
            kept: None,
            typed: None,
            suppressed: false,
            weight: 1.0,
        }
    }

    /// Turn `index` of an episode whose turns have these own rewards, for tests.
    pub fn example_of(episode: u128, index: usize, rewards: &[Option<f64>]) -> Self {
        Sample {
            turn: Some(Turn {
                episode: Uuid::from_u128(episode),
                index,
                rewards: rewards.into(),
            }),
            ..Sample::example()
        }
    }
}

/// How the tokens of one generation were sampled, if not from the model's own distribution at some
/// temperature.
#[derive(Debug, Clone, PartialEq)]
pub struct Behavior {
    pub params: Params,
    /// Number of candidate tokens, one value per sampled token, if it was logged.
    pub candidates: Option<Vec<u32>>,
    /// Which ids a grammar allowed at each sampled token. `None`: none excluded any.
    pub masks: Option<Masks>,
}

impl Behavior {
    /// Without the constraint, which needs a tokenizer: [`Sample::constrain`]. `None`: the model's own
    /// distribution.
    pub fn from_logged(temperature: f32, top_p: f32, sampling: Option<Sampling>) -> Option<Self> {
        // no `..`: a parameter that is added to the event must be added here
        let Sampling {
            top_k,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
            kept: candidates,
            constraint: _,
        } = sampling.unwrap_or_default();
        let params = Params {
            temperature,
            top_p,
            top_k,
            min_p,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            logit_bias,
        };
        (!params.is_plain()).then_some(Behavior {
            params,
            candidates,
            masks: None,
        })
    }
}

/// What a model demands of trajectories.
#[derive(Debug, Clone, Default)]
pub struct ModelLimits {
    /// Longest sequence, tokens.
    pub context: i64,
    /// Token ids are below this.
    pub vocabulary: i64,
    /// The decline token. `None`: the policy cannot decline.
    pub decline: Option<u32>,
    pub experts: Routed,
    pub grammars: Grammars,
}

/// The experts of a model.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Routed {
    #[default]
    Dense,
    /// Our trainer does not compute the model: logged ids are passed on as they are.
    Unknown,
    Known(Experts),
}

impl From<Option<Experts>> for Routed {
    fn from(experts: Option<Experts>) -> Self {
        experts.map_or(Routed::Dense, Routed::Known)
    }
}
