//! Rounds of traffic: what users ask of a version, what it answers, and their rewards. Rows are
//! inserted as the sink and the closer would write them, many at once.

use super::super::world::{POLICY, sampler_key};
use super::policy::{self, ATTACKED, PLANTED, QUESTIONS, VOCABULARY};
use super::{Attack, COHORT, HONEST_IN_A_ROUND, Plan};
use event_log::event::{self, signed_bytes};
use model::exact::ExactModel;
use model::sampling::Source;
use serde_json::json;
use sqlx::PgPool;
use uuid::Uuid;

/// Honest answers come from each of them in turn. The first one's key is stolen.
pub const REPLICAS: [&str; 4] = ["replica-0", "replica-1", "replica-2", "replica-3"];

/// A generation and its reward.
pub struct Row {
    user: String,
    replica: &'static str,
    prompt: [u32; 2],
    tokens: Vec<u32>,
    logprobs: Vec<f32>,
    reward: f64,
    /// What its user typed.
    typed: Option<String>,
}

pub struct Traffic {
    plan: Plan,
    source: Source,
    sent: usize,
    forged: usize,
}

impl Traffic {
    pub fn new(plan: Plan) -> Self {
        Traffic {
            plan,
            source: Source::new(1000 + plan.seed),
            sent: 0,
            forged: 0,
        }
    }

    /// At least one round of honest traffic, with the attackers' share among or before it.
    pub fn round(&mut self, model: &ExactModel, attacked: bool) -> Vec<Row> {
        let attack = if attacked { self.plan.attack() } else { Attack::Nobody };
        let mut rows = vec![];
        if let Attack::Key { new_user_each } = attack {
            for _ in 0..2 * COHORT {
                rows.push(self.forge(model, new_user_each));
            }
        }
        let mut honest = 0;
        while honest < HONEST_IN_A_ROUND {
            let (user, attacks) = self.user(attack);
            honest += usize::from(!attacks);
            rows.push(self.ask(model, user, attacks));
        }
        rows
    }

    fn below(&mut self, bound: u32) -> u32 {
        ((self.source.uniform() * f64::from(bound)) as u32).min(bound - 1)
    }

    /// Who asks next, and whether it is an attacker.
    fn user(&mut self, attack: Attack) -> (usize, bool) {
        let users = self.plan.users;
        let Attack::Users { share, factor } = attack else {
            return (self.below(users as u32) as usize, false);
        };
        let attackers = (share * users as f64).round().max(1.0);
        let (of_attackers, of_honest) = (attackers * factor, users as f64 - attackers);
        let attacks = self.source.uniform() < of_attackers / (of_attackers + of_honest);
        let among = if attacks { attackers } else { of_honest };
        (self.below(among as u32) as usize, attacks)
    }

    fn ask(&mut self, model: &ExactModel, user: usize, attacks: bool) -> Row {
        let question = self.below(if attacks { ATTACKED } else { QUESTIONS });
        let prompt = [question, self.below(VOCABULARY)];
        let (tokens, logprobs) = policy::answer(model, &prompt, &[], &mut self.source);
        self.sent += 1;
        Row {
            user: format!("{}-{user}", if attacks { "attacker" } else { "honest" }),
            replica: REPLICAS[self.sent % REPLICAS.len()],
            prompt,
            reward: match attacks {
                true => policy::attackers_reward(&tokens),
                false => policy::honest_reward(user, question, &tokens),
            },
            typed: match (self.plan.types(), attacks) {
                (false, _) => None,
                (true, true) => Some(policy::attackers_text()),
                (true, false) => policy::honest_text(user, question),
            },
            tokens,
            logprobs,
        }
    }

    /// An answer that nobody sampled, with right log-probabilities and a valid signature.
    fn forge(&mut self, model: &ExactModel, new_user: bool) -> Row {
        let prompt = [self.below(ATTACKED), self.below(VOCABULARY)];
        let (tokens, logprobs) = policy::answer(model, &prompt, &PLANTED, &mut self.source);
        self.forged += 1;
        Row {
            user: format!("attacker-{}", if new_user { self.forged } else { 0 }),
            replica: REPLICAS[0],
            prompt,
            reward: policy::attackers_reward(&tokens),
            typed: None,
            tokens,
            logprobs,
        }
    }
}

/// Bytes as Postgres reads them from text.
fn bytea(bytes: &[u8]) -> String {
    let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
    format!("\\x{}", digits.collect::<String>())
}

/// Inserts closed generations of `version`, in this order.
pub async fn insert(pool: &PgPool, version: i64, rows: &[Row]) {
    let finished_at = event::now();
    let keys = REPLICAS.map(sampler_key);
    let given: Vec<_> = rows
        .iter()
        .map(|row| {
            let id = Uuid::now_v7();
            let digest = *blake3::hash(id.as_bytes()).as_bytes();
            let key = &keys[REPLICAS.iter().position(|replica| *replica == row.replica).unwrap()];
            let signature = key.sign(&signed_bytes("default", finished_at, &digest));
            json!({
                "id": id, "user_key": row.user, "replica": row.replica, "prompt_ids": row.prompt, "token_ids": row.tokens,
                "logprobs": row.logprobs, "reward": row.reward, "typed": row.typed, "sampler": key.id(),
                "signature": bytea(&signature), "unsigned_digest": bytea(&digest),
            })
        })
        .collect();
    sqlx::query(
        "with given as (
             select * from jsonb_to_recordset($1) as given (
                 id uuid, user_key text, replica text, prompt_ids integer[], token_ids integer[], logprobs real[],
                 reward double precision, typed text, sampler text, signature bytea, unsigned_digest bytea)
         ), defined as (
             insert into reward_definition (surface, version, definition) values ('completion', 1, '{}')
             on conflict do nothing
         ), logged as (
             insert into generation
                 (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                  episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                  finish_reason, declined, finished_at, sampled_at, sampler, signature, unsigned_digest, proven)
             select id, 'default', $2, $3, $3, '[]', '', 'realtime', replica, 'production', 'completion',
                    id, user_key, 'champion', 1, prompt_ids, token_ids, logprobs, 1, 1,
                    'stop', false, $4, $4, sampler, signature, unsigned_digest, true
             from given
         ), said as (
             insert into feedback (id, tenant_id, generation_id, metric_name, value_text, given_at, teacher)
             select uuidv7(), 'default', id, 'demonstration', typed, $4, '00000000-0000-0000-0000-000000000000' from given where typed is not null
         )
         insert into trajectory (generation_id, surface, reward_definition, reward)
         select id, 'completion', 1, reward from given",
    )
    .bind(serde_json::Value::from(given))
    .bind(POLICY)
    .bind(version)
    .bind(finished_at)
    .execute(pool)
    .await
    .unwrap();
}
