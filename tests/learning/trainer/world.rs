//! A policy with a base version, and trajectories that its own model sampled. Over 500 lines, because
//! every test of the trainer uses these helpers.

use artifact::checkpoint::Checkpoint;
use artifact::manifest::Manifest;
use artifact::sign::SigningKey;
use edge::audit::Actor;
use edge::sampler::{self, SamplerKey};
use edge::tenant;
use event_log::event::{self, signed_bytes};
use event_log::payload::Store as Payloads;
use fixture::{Stack, eventually};
use model::config::{Family, ModelConfig};
use model::exact::{ExactModel, KvCache};
use model::random_checkpoint;
use model::sampling::{Params, Source, sample, suppress};
use runs::Options;
use runs::claim::Claim;
use runs::publish::run_state::StepRecord;
use runs::publish::{Draft, Prepared, Publisher, QuantizedCopies, import_checkpoint};
use runs::sample::Sample;
use runs::settings::{Limits, StepSettings};
use sqlx::{AssertSqlSafe, PgPool, Row};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use store::Store;
use tokio_util::sync::CancellationToken;
use trainer::learn::learner::{Learner, Outcome};
use trainer::{Computing, Environment};
use uuid::Uuid;

pub const POLICY: &str = "demo";
/// The decline token of the world's policy.
pub const DECLINE: u32 = 40;

/// A policy in its own stack.
pub struct World {
    pub stack: Stack,
    pub publisher: Publisher,
    /// Serial of the imported version.
    pub base: i64,
    seeds: AtomicU64,
}

/// One generation and its reward.
#[derive(Debug, Clone)]
pub struct Sampled {
    pub id: Uuid,
    pub version: i64,
    pub prompt: Vec<u32>,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub temperature: f32,
    /// Sampled with the decline token masked.
    pub suppressed: bool,
    pub tenant: String,
    pub user: String,
    pub surface: String,
    pub replica: String,
    /// `None`: our own.
    pub engine: Option<String>,
    /// From the first token to the last. `None`: not logged.
    pub seconds: Option<f64>,
    /// `None`: censored.
    pub reward: Option<f64>,
}

impl Sampled {
    /// The same with a new id.
    pub fn renewed(self) -> Self {
        Sampled {
            id: Uuid::now_v7(),
            ..self
        }
    }
}

/// A row of `disposition`.
#[derive(Debug)]
pub struct Disposition {
    pub id: Uuid,
    pub kind: String,
    pub code: Option<String>,
    pub step: Option<i64>,
}

/// Who registers samplers.
pub const TEST: Actor<'static> = Actor {
    key: None,
    name: "test",
};

/// A test's own epochs are so far apart that [`ensure_assigned`] has room between them.
const EPOCHS_BETWEEN: i64 = 1000;

/// The sampler key of a replica.
pub fn sampler_key(replica: &str) -> SamplerKey {
    SamplerKey::from_seed(blake3::hash(replica.as_bytes()).as_bytes())
}

pub async fn register(pool: &PgPool, key: &SamplerKey, replica: &str) {
    sampler::register(pool, &key.public_key(), replica, Some(POLICY), None, TEST)
        .await
        .unwrap();
}

/// Assigns the version to the alias if it never was, as the release role does when a line moves. Requests that ask for the
/// same at once wait for each other: both would take the same epoch.
pub async fn ensure_assigned(pool: &PgPool, alias: &str, version: i64) {
    let mut transaction = edge::database::begin(pool).await.unwrap();
    sqlx::query("select pg_advisory_xact_lock(hashtext('ensure_assigned'))")
        .execute(&mut *transaction)
        .await
        .unwrap();
    sqlx::query(
        "insert into assignment (policy, epoch, alias, version, follows, branch)
         select $1, (select coalesce(max(epoch), 0) + 1 from assignment where policy = $1), $2, $3, 'realtime',
                coalesce((select branch from line where policy = $1 and line = 'realtime'), 0)
         where not exists (select from assignment where policy = $1 and alias = $2 and version = $3)",
    )
    .bind(POLICY)
    .bind(alias)
    .bind(version)
    .execute(&mut *transaction)
    .await
    .unwrap();
    transaction.commit().await.unwrap();
}

/// A running trainer.
pub struct Running {
    shutdown: CancellationToken,
    work: tokio::task::JoinHandle<anyhow::Result<()>>,
}

impl Running {
    /// Whether it has ended by itself.
    pub fn has_ended(&self) -> bool {
        self.work.is_finished()
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        self.work.await.unwrap().unwrap();
    }
}

pub fn config() -> ModelConfig {
    ModelConfig {
        vocab_size: 61,
        hidden_size: 32,
        intermediate_size: 48,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-6,
        max_position_embeddings: 64,
        tie_word_embeddings: true,
        qk_norm: true,
        family: Family::Qwen3,
        ..ModelConfig::default()
    }
}

impl World {
    pub async fn start(name: &str) -> Self {
        Self::start_with(name, &config()).await
    }

    pub async fn start_with(name: &str, config: &ModelConfig) -> Self {
        let mut checkpoint = random_checkpoint(config, 11);
        let generation = serde_json::json!({"springtide_decline_token_id": DECLINE});
        checkpoint
            .files
            .insert("generation_config.json".into(), generation.to_string().into());
        Self::start_from(name, checkpoint).await
    }

    /// `checkpoint`: the base version.
    pub async fn start_from(name: &str, checkpoint: Checkpoint) -> Self {
        let stack = Stack::start(name).await;
        let key = SigningKey::load_or_create(&stack.keys_dir, "trainer").unwrap();
        let publisher = Publisher {
            pool: stack.pool_of("train"),
            store: Store::open(&stack.store_url).unwrap(),
            keys_dir: stack.keys_dir.clone(),
            key: Arc::new(key),
            announce: None,
            policy: POLICY.into(),
            checkpoint_every: 50,
            run_states_kept: 2,
            quantized: QuantizedCopies::default(),
        };
        let checkpoint = Arc::new(checkpoint);
        tenant::own(&publisher.pool, POLICY, "default", TEST).await.unwrap();
        let base = import_checkpoint(&publisher, checkpoint, "realtime").await.unwrap();
        World {
            stack,
            publisher,
            base,
            seeds: AtomicU64::new(1),
        }
    }

    /// The store of payloads.
    pub fn payloads(&self) -> Payloads {
        Payloads::open(&format!("file://{}", self.stack.dir.path().join("payloads").display())).unwrap()
    }

    pub fn options(&self) -> Options {
        let mut options = Options {
            poll_ms: 20,
            ..Options::default()
        };
        // One arm is enough here. `tests/serving/arms.rs` and `tests/learning/spine.rs` learn from `learner`.
        options.realtime.alias = Some("champion".into());
        options.realtime.cohort_size = 8;
        options.offline.enabled = false;
        options
    }

    /// Starts a trainer without a fleet.
    pub fn run(&self, options: Options) -> Running {
        self.run_against(options, "http://127.0.0.1:9")
    }

    /// Starts a trainer whose rollouts come from `serve_url`.
    pub fn run_against(&self, options: Options, serve_url: &str) -> Running {
        let environment = Environment {
            policy: POLICY.into(),
            compute: model::exact::Compute::F32,
            quantized: vec![],
            serves: None,
            base_dir: None,
            kafka: self.stack.kafka.clone(),
            pool: self.stack.pool_of("train"),
            store: self.publisher.store.clone(),
            payloads: self.payloads(),
            keys_dir: self.stack.keys_dir.clone(),
            serve_url: serve_url.into(),
            control_url: "http://127.0.0.1:9".into(),
            state_dir: self.stack.dir.path().join("train"),
            computing: Computing::default(),
        };
        let shutdown = CancellationToken::new();
        let work = tokio::spawn(trainer::run(options, environment, shutdown.clone()));
        Running { shutdown, work }
    }

    /// Waits for a few dozen polls of the trainer.
    pub async fn settled(&self) {
        tokio::time::sleep(Duration::from_millis(1500)).await;
    }

    pub async fn materialize(&self, version: i64) -> Arc<Checkpoint> {
        self.publisher.load(version).await.unwrap()
    }

    pub async fn manifest(&self, version: i64) -> Manifest {
        let (publisher, keys) = (&self.publisher, self.publisher.trusted().await.unwrap());
        publisher.store.get_manifest(POLICY, version, &keys).await.unwrap()
    }

    /// Generations of `version`, newest ids last, with rewards of both signs.
    pub async fn sample(&self, version: i64, count: usize) -> Vec<Sampled> {
        self.sample_at(1.0, version, count).await
    }

    /// 0 is greedy.
    pub async fn sample_at(&self, temperature: f32, version: i64, count: usize) -> Vec<Sampled> {
        let params = Params {
            temperature,
            ..Params::default()
        };
        let checkpoint = self.materialize(version).await;
        let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
        (0..count)
            .map(|i| {
                let seed = self.seeds.fetch_add(1, Ordering::Relaxed);
                let prompt: Vec<u32> = (0..3 + seed % 5).map(|j| ((seed * 7 + j * 11) % 61) as u32).collect();
                let suppressed = seed % 4 == 1;
                let masked = suppressed.then_some(DECLINE);
                let (tokens, logprobs) = generate_with(&model, &prompt, &params, seed, masked);
                Sampled {
                    id: Uuid::now_v7(),
                    version,
                    prompt,
                    tokens,
                    logprobs,
                    temperature,
                    suppressed,
                    tenant: "default".into(),
                    user: "u".into(),
                    surface: "completion".into(),
                    replica: "r".into(),
                    engine: None,
                    seconds: None,
                    reward: Some(if i % 3 == 0 { 0.75 } else { -0.25 }),
                }
            })
            .collect()
    }

    pub async fn insert_all(&self, sampled: &[Sampled], arm: &str) {
        for one in sampled {
            self.insert(one, arm).await;
        }
    }

    pub async fn insert(&self, sampled: &Sampled, arm: &str) {
        self.insert_generation(sampled, arm).await;
        self.insert_trajectory(sampled, sampled.reward).await;
    }

    /// A generation whose horizon has not passed.
    pub async fn insert_open(&self, sampled: &Sampled, arm: &str) {
        self.insert_generation(sampled, arm).await;
        sqlx::query("insert into open_generation values ($1, $2, now() + interval '1 hour', true)")
            .bind(sampled.id)
            .bind(&sampled.surface)
            .execute(&self.stack.pool)
            .await
            .unwrap();
    }

    /// Closed generations like this one, with young ids and a signature that the sink found wrong.
    pub async fn insert_unproven(&self, like: &Sampled, surface: &str, count: i32) {
        self.ensure_defined(surface).await;
        sqlx::query(
            "with forged as (
                 insert into generation
                     (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                      episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                      finish_reason, declined, finished_at, sampled_at, sampler, signature, unsigned_digest, proven)
                 select uuidv7(), tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, $2,
                        episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                        finish_reason, declined, sampled_at, sampled_at, sampler, decode(repeat('07', 64), 'hex'),
                        unsigned_digest, false
                 from generation, generate_series(1, $3)
                 where id = $1
                 returning id
             )
             insert into trajectory (generation_id, surface, reward_definition, reward) select id, $2, 1, 1 from forged",
        )
        .bind(like.id)
        .bind(surface)
        .bind(count)
        .execute(&self.stack.pool)
        .await
        .unwrap();
    }

    pub async fn close(&self, sampled: &Sampled, reward: f64) {
        self.insert_trajectory(sampled, Some(reward)).await;
        sqlx::query("delete from open_generation where generation_id = $1")
            .bind(sampled.id)
            .execute(&self.stack.pool)
            .await
            .unwrap();
    }

    async fn insert_trajectory(&self, sampled: &Sampled, reward: Option<f64>) {
        let censored = reward.is_none().then_some("no_feedback");
        sqlx::query(
            "insert into trajectory (generation_id, surface, reward_definition, reward, censor_code)
             values ($1, $4, 1, $2, $3)",
        )
        .bind(sampled.id)
        .bind(reward)
        .bind(censored)
        .bind(&sampled.surface)
        .execute(&self.stack.pool)
        .await
        .unwrap();
    }

    /// A generation with the proof of its replica, which is assigned the version. The surface is
    /// defined if it was not.
    async fn insert_generation(&self, sampled: &Sampled, arm: &str) {
        self.ensure_defined(&sampled.surface).await;
        let key = sampler_key(&sampled.replica);
        register(&self.stack.pool, &key, &sampled.replica).await;
        ensure_assigned(&self.stack.pool, arm, sampled.version).await;
        let finished_at = event::now();
        let digest = *blake3::hash(sampled.id.as_bytes()).as_bytes();
        let signature = key.sign(&signed_bytes(&sampled.tenant, finished_at, &digest));
        let ids = |ids: &[u32]| ids.iter().map(|&id| id as i32).collect::<Vec<i32>>();
        sqlx::query(
            "insert into generation
                 (id, tenant_id, policy, version, version_oldest, version_spans, root, line, replica, purpose, surface,
                  episode_id, user_key, arm, arm_probability, prompt_ids, token_ids, logprobs, temperature, top_p,
                  finish_reason, declined, decline_suppressed, exploration_share, finished_at, sampled_at, sampler,
                  signature, unsigned_digest, proven, engine)
             values ($1, $19, $2, $3, $3, '[]', '', 'realtime', $13, 'production', $12,
                     $1, $11, $4, 1, $5, $6, $7, $8, 1, 'stop', $9, $10, 0.25, case when $14::double precision is null then null else $15 end,
                     $15::timestamptz - make_interval(secs => coalesce($14, 0)), $16, $17, $18, true, $20)",
        )
        .bind(sampled.id)
        .bind(POLICY)
        .bind(sampled.version)
        .bind(arm)
        .bind(ids(&sampled.prompt))
        .bind(ids(&sampled.tokens))
        .bind(&sampled.logprobs)
        .bind(sampled.temperature)
        .bind(sampled.tokens.contains(&DECLINE))
        .bind(sampled.suppressed)
        .bind(&sampled.user)
        .bind(&sampled.surface)
        .bind(&sampled.replica)
        .bind(sampled.seconds)
        .bind(finished_at)
        .bind(key.id())
        .bind(signature.as_slice())
        .bind(digest.as_slice())
        .bind(&sampled.tenant)
        .bind(&sampled.engine)
        .execute(&self.stack.pool)
        .await
        .unwrap();
    }

    async fn ensure_defined(&self, surface: &str) {
        let sql =
            "insert into reward_definition (surface, version, definition) values ($1, 1, '{}') on conflict do nothing";
        sqlx::query(sql).bind(surface).execute(&self.stack.pool).await.unwrap();
    }

    /// Defines a surface, as ingest stores it.
    pub async fn define(&self, definition: &serde_json::Value) {
        sqlx::query("insert into reward_definition (surface, version, definition) values ($1 ->> 'name', 1, $1)")
            .bind(definition)
            .execute(&self.stack.pool)
            .await
            .unwrap();
    }

    /// The tables hold every event up to `at`, as the sink would write it.
    pub async fn caught_up_to(&self, at: time::OffsetDateTime) {
        sqlx::query(
            "insert into consumer_offset (consumer, cluster_id, topic, partition, caught_up_to)
             values ('sink', 'c', 't', 0, $1)
             on conflict (consumer, cluster_id, topic, partition)
             do update set caught_up_to = excluded.caught_up_to, updated_at = clock_timestamp()",
        )
        .bind(at)
        .execute(&self.stack.pool)
        .await
        .unwrap();
    }

    /// `champion` serves `version` and follows the realtime line.
    pub async fn follow(&self, epoch: i64, version: i64, branch: i32) {
        self.assign(epoch, version, Some("realtime"), branch).await;
    }

    pub async fn pin(&self, epoch: i64, version: i64) {
        self.assign(epoch, version, None, 0).await;
    }

    async fn assign(&self, epoch: i64, version: i64, follows: Option<&str>, branch: i32) {
        sqlx::query(
            "insert into assignment (policy, epoch, alias, version, follows, branch) values ($1, $2, 'champion', $3, $4, $5)",
        )
        .bind(POLICY)
        .bind(epoch * EPOCHS_BETWEEN)
        .bind(version)
        .bind(follows)
        .bind(branch)
        .execute(&self.stack.pool)
        .await
        .unwrap();
    }

    /// Head and branch of the realtime line.
    pub async fn line(&self) -> (i64, i32) {
        sqlx::query_as("select head, branch from line where policy = $1 and line = 'realtime'")
            .bind(POLICY)
            .fetch_one(&self.stack.pool)
            .await
            .unwrap()
    }

    /// Waits until the realtime line has left `version`. Returns its new head.
    pub async fn head_after(&self, version: i64) -> i64 {
        eventually("a version is published", Duration::from_secs(60), async || {
            let (head, _) = self.line().await;
            (head != version).then_some(head)
        })
        .await
    }

    pub async fn root(&self, version: i64) -> String {
        sqlx::query_scalar("select encode(root, 'hex') from version where serial = $1")
            .bind(version)
            .fetch_one(&self.stack.pool)
            .await
            .unwrap()
    }

    /// (What a generation has in this column, code, or kind if there is none) → how many.
    pub async fn decided_by(&self, column: &'static str) -> BTreeMap<(String, String), i64> {
        let sql = format!(
            "select g.{column}, coalesce(d.code, d.kind), count(*) from disposition d
             join generation g on g.id = d.generation_id group by 1, 2"
        );
        let rows: Vec<(String, String, i64)> = sqlx::query_as(AssertSqlSafe(sql))
            .fetch_all(&self.stack.pool)
            .await
            .unwrap();
        rows.into_iter().map(|(of, code, count)| ((of, code), count)).collect()
    }

    pub async fn dispositions(&self) -> Vec<Disposition> {
        let rows = sqlx::query("select generation_id, kind, code, step from disposition order by generation_id")
            .fetch_all(&self.stack.pool)
            .await
            .unwrap();
        let read = |row: sqlx::postgres::PgRow| Disposition {
            id: row.get(0),
            kind: row.get(1),
            code: row.get(2),
            step: row.get(3),
        };
        rows.into_iter().map(read).collect()
    }

    pub async fn ledger(&self, disposition: &str) -> i64 {
        sqlx::query_scalar("select count(*) from ledger where disposition = $1")
            .bind(disposition)
            .fetch_one(&self.stack.pool)
            .await
            .unwrap()
    }

    pub async fn steps(&self) -> i64 {
        sqlx::query_scalar("select count(*) from step")
            .fetch_one(&self.stack.pool)
            .await
            .unwrap()
    }

    pub async fn metrics(&self, step: i64) -> serde_json::Value {
        sqlx::query_scalar("select metrics from step where step = $1")
            .bind(step)
            .fetch_one(&self.stack.pool)
            .await
            .unwrap()
    }

    /// Status and reason of the realtime run, once it exists.
    pub async fn status(&self) -> Option<(String, Option<String>)> {
        sqlx::query_as("select status, reason from run where kind = 'realtime'")
            .fetch_optional(&self.stack.pool)
            .await
            .unwrap()
    }

    /// Waits until the realtime run is paused. Returns the reason.
    pub async fn paused(&self) -> String {
        eventually("the run pauses", Duration::from_secs(60), async || {
            let (status, reason) = self.status().await?;
            (status == "paused").then(|| reason.unwrap_or_default())
        })
        .await
    }

    pub async fn events(&self) -> Vec<String> {
        sqlx::query_scalar("select message from run_event order by id")
            .fetch_all(&self.stack.pool)
            .await
            .unwrap()
    }

    /// A realtime run that this test executes itself.
    pub async fn claimed_run(&self) -> (Uuid, Claim) {
        let run = Uuid::now_v7();
        sqlx::query(
            "insert into run (id, kind, policy, line, status, config) values ($1, 'realtime', $2, 'realtime', 'queued', '{}')",
        )
        .bind(run)
        .bind(POLICY)
        .execute(&self.stack.pool)
        .await
        .unwrap();
        let claim = Claim::take(&self.stack.pool, run).await.unwrap().unwrap();
        (run, claim)
    }

    /// The first step of `run` on `cohort`, up to its manifest.
    pub async fn prepare(&self, claim: &Claim, run: Uuid, cohort: &[Sampled]) -> Prepared {
        self.publisher
            .prepare(claim, self.draft(run, cohort).await)
            .await
            .unwrap()
    }

    /// The first step of `run` on `cohort`, computed.
    pub async fn draft(&self, run: Uuid, cohort: &[Sampled]) -> Draft {
        let checkpoint = self.materialize(self.base).await;
        let record = StepRecord {
            run,
            step: 1,
            cohort: cohort.iter().map(|s| s.id).collect(),
            dropped: Default::default(),
            typed: BTreeMap::new(),
            lease: None,
            baselines: Default::default(),
            metrics: serde_json::json!({}),
        };
        let samples: Vec<Sample> = cohort.iter().map(to_sample).collect();
        draft(checkpoint, &samples, record, self.base)
    }
}

fn draft(checkpoint: Arc<Checkpoint>, samples: &[Sample], record: StepRecord, parent: i64) -> Draft {
    let mut learner = Learner::from_checkpoint(checkpoint).unwrap();
    let advantages: Vec<f64> = samples.iter().map(|s| s.reward).collect();
    let outcome = learner
        .propose(samples, &advantages, &StepSettings::default(), &Limits::default())
        .unwrap();
    let Outcome::Proposed(proposal) = outcome else {
        panic!("a guard refused: {outcome:?}")
    };
    Draft {
        line: "realtime".into(),
        branch: 0,
        parent,
        parent_checkpoint: proposal.parent,
        checkpoint: proposal.checkpoint,
        run_state: learner.run_state(record.clone(), 0).encode().unwrap(),
        record,
        reference: None,
        adapts: None,
    }
}

fn to_sample(sampled: &Sampled) -> Sample {
    Sample {
        generation: sampled.id,
        tenant: sampled.tenant.clone(),
        user: sampled.user.clone(),
        replica: "r".into(),
        engine: sampled.engine.clone(),
        class: "completion".into(),
        group: None,
        turn: None,
        version: sampled.version,
        staleness: 0,
        prompt: sampled.prompt.clone(),
        tokens: sampled.tokens.clone(),
        logprobs: sampled.logprobs.clone(),
        mask: vec![true; sampled.tokens.len()],
        temperature: 1.0,
        behavior: None,
        experts: None,
        reward: sampled.reward.unwrap(),
        kept: None,
        typed: None,
        suppressed: sampled.suppressed,
        weight: runs::explore::weight(sampled.tokens.contains(&DECLINE), Some(0.25)),
    }
}

/// Samples five tokens through the KV cache, as serving does, without the suppressed one.
pub fn generate(model: &ExactModel, prompt: &[u32], seed: u64, suppressed: Option<u32>) -> (Vec<u32>, Vec<f32>) {
    generate_with(model, prompt, &Params::default(), seed, suppressed)
}

fn generate_with(
    model: &ExactModel,
    prompt: &[u32],
    params: &Params,
    seed: u64,
    suppressed: Option<u32>,
) -> (Vec<u32>, Vec<f32>) {
    let mut cache = KvCache::new(model, 1, 64);
    let mut source = Source::new(seed);
    let mut logits = model.prefill(&mut cache, 0, prompt).unwrap();
    let (mut tokens, mut logprobs) = (Vec::new(), Vec::new());
    for _ in 0..5 {
        if let Some(id) = suppressed {
            suppress(&mut logits, id);
        }
        let (token, logprob) = sample(&logits, params, &mut source);
        tokens.push(token);
        logprobs.push(logprob);
        logits = model.decode(&mut cache, &[token]).unwrap().remove(0);
    }
    (tokens, logprobs)
}
