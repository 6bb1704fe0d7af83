//! A batch, pass by pass: what it reads, and that what it samples depends on nothing but the version
//! and the sequence.

use super::*;
use crate::engine::SampleEvent;
use crate::engine::exact::{ExactBackend, Staging};
use crate::engine::{Finish, Token};
use artifact::checkpoint::Checkpoint;
use artifact::digest::Digest;
use artifact::threads::Threads;
use model::exact::{Arithmetic, ExactModel, KvCache};
use model::router::Routing;
use model::sampling::{self, Params};
use proptest::prelude::*;
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;
use tokio::sync::mpsc;

/// A slot, and how many tokens one pass read into it.
type Read = (usize, usize);

/// Samples the token 1 and remembers what each pass read.
struct Recorder {
    lengths: Vec<usize>,
    passes: Arc<Mutex<Vec<Vec<Read>>>>,
}

impl Backend for Recorder {
    fn slots(&self) -> usize {
        self.lengths.len()
    }

    fn advance(&mut self, segments: &[(usize, &[u32])]) -> anyhow::Result<Vec<Step>> {
        let pass = segments.iter().map(|(slot, ids)| (*slot, ids.len())).collect();
        self.passes.lock().unwrap().push(pass);
        for (slot, ids) in segments {
            self.lengths[*slot] += ids.len();
        }
        let logits = vec![0.0, 50.0, 0.0];
        let step = Step {
            logits,
            ..Step::default()
        };
        Ok(vec![step; segments.len()])
    }

    fn copy_prefix(&mut self, from: usize, to: usize, tokens: usize) {
        assert!(tokens <= self.lengths[from]);
        self.lengths[to] = tokens;
    }
}

struct Recorded {
    batch: Batch,
    passes: Arc<Mutex<Vec<Vec<Read>>>>,
}

impl Recorded {
    fn new(slots: usize) -> Self {
        let passes = Arc::default();
        let backend = Recorder {
            lengths: vec![0; slots],
            passes: Arc::clone(&passes),
        };
        let batch = Batch::new(version(None), Box::new(backend));
        Recorded { batch, passes }
    }

    /// What the next pass reads.
    fn pass(&mut self, prompt_tokens: usize) -> Vec<Read> {
        self.batch.resume(0, usize::MAX);
        self.batch.advance(prompt_tokens);
        self.passes.lock().unwrap().pop().unwrap_or_default()
    }

    fn admit(&mut self, prompt: &[u32], max_tokens: usize) -> mpsc::Receiver<SampleEvent> {
        self.admit_of("a", TrafficClass::Production, prompt, max_tokens)
    }

    fn admit_of(
        &mut self,
        tenant: &str,
        class: TrafficClass,
        prompt: &[u32],
        max_tokens: usize,
    ) -> mpsc::Receiver<SampleEvent> {
        let (request, events) = request(&self.batch.version, tenant, class, prompt, max_tokens);
        self.batch.admit(request);
        events
    }
}

fn version(experts: Option<u16>) -> Arc<LoadedVersion> {
    Arc::new(LoadedVersion {
        serial: 1,
        root: Digest([1; 32]),
        line: "realtime".into(),
        adapts: None,
        context: 512,
        vocab: 96,
        stop_ids: vec![],
        experts,
        decline_id: None,
        tokenizer: None,
        reference: None,
        templates: crate::routing::tests::no_templates(),
    })
}

fn request(
    version: &Arc<LoadedVersion>,
    tenant: &str,
    class: TrafficClass,
    prompt: &[u32],
    max_tokens: usize,
) -> (SampleRequest, mpsc::Receiver<SampleEvent>) {
    let (sender, events) = mpsc::channel(max_tokens + 1);
    let request = SampleRequest {
        version: version.clone(),
        prompt: prompt.into(),
        max_tokens,
        params: Params::default(),
        seed: u64::from(prompt[0]),
        suppressed: None,
        constraint: None,
        ends: Default::default(),
        score_prompt: None,
        top_logprobs: 0,
        caller: Caller::new(tenant, None),
        class,
        priority: 0,
        session: None,
        events: sender,
        submitted: Instant::now(),
    };
    (request, events)
}

fn numbers(from: u32, count: usize) -> Vec<u32> {
    (from..).take(count).collect()
}

#[test]
fn a_long_prompt_is_read_in_parts_beside_the_tokens_of_others() {
    let mut it = Recorded::new(3);
    let _short = it.admit(&[7], 50);
    assert_eq!(it.pass(10), [(2, 1)]);
    let _long = it.admit(&numbers(100, 25), 50);
    let _next = it.admit(&numbers(200, 4), 50);
    assert_eq!(it.pass(10), [(2, 1), (1, 10)]);
    assert_eq!(it.pass(10), [(2, 1), (1, 10)]);
    assert_eq!(it.pass(10), [(2, 1), (1, 5), (0, 4)]);
    assert_eq!(it.pass(10), [(2, 1), (1, 1), (0, 1)]);
}

#[test]
fn prompts_of_users_are_read_before_those_of_rollouts() {
    let mut it = Recorded::new(2);
    let _rollout = it.admit_of("a", TrafficClass::Background, &numbers(100, 20), 5);
    let _user = it.admit(&numbers(200, 15), 5);
    assert_eq!(it.pass(10), [(0, 10)]);
    assert_eq!(it.pass(10), [(0, 5), (1, 5)]);
}

#[test]
fn the_next_turn_of_a_session_reads_what_is_new() {
    let mut it = Recorded::new(3);
    let prompt = numbers(100, 40);
    let first = it.admit(&prompt, 2);
    assert_eq!(it.pass(100), [(2, 40)]);
    assert_eq!(it.pass(100), [(2, 1)]);
    drop(first);
    let mut next = [&prompt[..], &[1, 1], &numbers(300, 10)].concat();
    let _others = it.admit_of("b", TrafficClass::Production, &next, 2);
    assert_eq!(it.pass(100), [(1, 52)], "nobody else's tokens are used");
    next[51] = 999;
    let _second = it.admit(&next, 2);
    // the last sampled token was never read
    assert_eq!(it.pass(100), [(1, 1), (2, 52 - 41)]);
}

#[test]
fn choices_of_one_prompt_read_it_once() {
    let mut it = Recorded::new(4);
    let prompt = numbers(100, 40);
    let _events: Vec<_> = (0..3).map(|_| it.admit(&prompt, 2)).collect();
    assert_eq!(it.pass(30), [(3, 30)]);
    assert_eq!(it.pass(30), [(3, 10), (2, 10), (1, 10)], "from a copy of what is read");
    assert_eq!(it.pass(30).len(), 3);
    assert_eq!(it.batch.sequences(), 0);
}

#[test]
fn a_user_takes_the_slot_of_the_last_rollout_which_continues_later() {
    let mut it = Recorded::new(2);
    let background = TrafficClass::Background;
    let mut rollouts = Vec::new();
    for from in [100, 200] {
        assert_eq!(it.batch.room(background, 0), 2 - rollouts.len());
        rollouts.push(it.admit_of("a", background, &numbers(from, 20), 4));
    }
    it.pass(100);
    assert_eq!(
        (it.batch.room(TrafficClass::Production, 0), it.batch.room(background, 0)),
        (2, 0)
    );
    let user = it.admit(&numbers(300, 20), 2);
    assert_eq!(it.pass(100).len(), 2);
    assert_eq!(it.batch.room(TrafficClass::Production, 0), 1);
    assert_eq!(
        it.batch.sequences(),
        3,
        "a version with a paused sequence does not retire"
    );
    it.pass(100);
    assert_eq!(user.len(), 3);
    assert_eq!(it.batch.room(background, 0), 0, "those that pause come first");
    // its slot was overwritten, so it reads the prompt and the sampled token again
    assert_eq!(it.pass(100), [(1, 1), (0, 21)]);
    for _ in 0..3 {
        it.pass(100);
    }
    assert_eq!(rollouts.iter().map(mpsc::Receiver::len).collect::<Vec<_>>(), [5, 5]);
}

#[test]
fn the_rollout_that_has_sampled_least_loses_its_slot() {
    let mut it = Recorded::new(3);
    let background = TrafficClass::Background;
    let first = it.admit_of("a", background, &numbers(0, 20), 9);
    it.pass(100);
    let second = it.admit_of("a", background, &numbers(40, 20), 9);
    it.pass(100);
    it.batch.park_one();
    assert_eq!((it.batch.parked(), it.batch.in_slots(background)), (1, 1));
    let (before, parked) = (first.len(), second.len());
    it.batch.advance(100);
    assert_eq!(
        (first.len(), second.len()),
        (before + 1, parked),
        "the younger one is parked"
    );
    // nothing has overwritten its slot, so it reads nothing again
    assert_eq!(it.batch.resume(0, 1), 1);
    let parts = it.batch.advance(100);
    assert!(
        parts.iter().all(|part| part.read == 1 && part.read_again == 0),
        "{parts:?}"
    );
}

#[test]
fn a_paused_rollout_whose_caller_left_is_forgotten() {
    let mut it = Recorded::new(1);
    let rollout = it.admit_of("a", TrafficClass::Background, &[1], 4);
    let _user = it.admit(&[2], 4);
    assert_eq!(it.batch.sequences(), 2);
    drop(rollout);
    it.pass(10);
    assert_eq!(it.batch.sequences(), 1);
}

/// The tokens of a sequence, computed alone: the prompt in one pass, then one token at a time.
fn alone(model: &ExactModel, prompt: &[u32], max_tokens: usize) -> Vec<Token> {
    let mut cache = KvCache::new(model, 1, 128);
    let mut source = sampling::Source::new(u64::from(prompt[0]));
    let mut ids = prompt.to_vec();
    let mut tokens = Vec::new();
    for _ in 0..max_tokens {
        let mut routing = Routing::default();
        let steps = model.advance(&mut cache, &[(0, &ids)], Some(&mut routing)).unwrap();
        let drawn = sampling::draw(
            &steps[0],
            &Params::default(),
            &sampling::PreviousTokens::default(),
            &mut source,
        );
        tokens.push(Token {
            id: drawn.id,
            logprob: drawn.log_prob,
            candidates: Some(drawn.candidates),
            routing,
            top: vec![],
        });
        ids = vec![drawn.id];
    }
    tokens
}

/// Where the parts of a prompt end, the last layer's experts are known, elsewhere they are not.
fn without_last_layer(routing: &Routing) -> Vec<(i64, Vec<u32>)> {
    let layers = routing.layers();
    layers[..layers.len().saturating_sub(1)].to_vec()
}

#[derive(Debug, Clone)]
struct Arrival {
    /// Passes since the arrival before.
    after: usize,
    tenant: &'static str,
    class: TrafficClass,
    /// Which of four texts the prompt is taken from, so that prompts share prefixes.
    text: u32,
    prompt: usize,
    max_tokens: usize,
    /// The caller leaves after so many passes.
    leaves: Option<usize>,
    /// So many background sequences lose their slots before.
    parked: usize,
}

fn arrival() -> impl Strategy<Value = Arrival> {
    let class = prop_oneof![Just(TrafficClass::Production), Just(TrafficClass::Background)];
    let tenant = prop_oneof![4 => Just("a"), 1 => Just("b")];
    let leaves = prop_oneof![4 => Just(None), 1 => (0..6_usize).prop_map(Some)];
    (
        0..4_usize,
        tenant,
        class,
        0..3_u32,
        1..60_usize,
        1..6_usize,
        leaves,
        0..3_usize,
    )
        .prop_map(
            |(after, tenant, class, text, prompt, max_tokens, leaves, parked)| Arrival {
                after,
                tenant,
                class,
                text,
                prompt,
                max_tokens,
                leaves,
                parked,
            },
        )
}

fn text(seed: u32, tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| (seed * 31 + i * (7 + seed)) % 96).collect()
}

/// An arrival that was admitted in pass `since`.
struct Served<'a> {
    arrival: &'a Arrival,
    since: usize,
    events: Option<mpsc::Receiver<SampleEvent>>,
}

struct Run<'a> {
    batch: Batch,
    prompt_tokens: usize,
    served: Vec<Served<'a>>,
    passes: usize,
}

impl Run<'_> {
    fn pass(&mut self) {
        self.passes += 1;
        for served in &mut self.served {
            if served
                .arrival
                .leaves
                .is_some_and(|after| self.passes > served.since + after)
            {
                served.events = None;
            }
        }
        self.batch.resume(1, usize::MAX);
        self.batch.advance(self.prompt_tokens);
    }
}

/// Serves the arrivals with few slots and small parts, and compares each token's bits.
fn compare(folder: &str, arrivals: &[Arrival], prompt_tokens: usize) {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../policy/model/tests/golden");
    let checkpoint = Checkpoint::read_dir(&golden.join(folder)).unwrap();
    let staging = Staging {
        arithmetic: Arithmetic::default(),
        packing: Threads::ONE,
        slots: 3,
        context: 128,
    };
    let backend = ExactBackend::stage(&checkpoint, &staging).unwrap();
    let version = version(backend.experts());
    let mut run = Run {
        batch: Batch::new(version.clone(), Box::new(backend)),
        prompt_tokens,
        served: Vec::new(),
        passes: 0,
    };
    for arrival in arrivals {
        for _ in 0..arrival.after {
            run.pass();
        }
        for _ in 0..arrival.parked {
            run.batch.park_one();
        }
        while run.batch.room(arrival.class, 1) == 0 {
            run.pass();
        }
        let prompt = text(arrival.text, arrival.prompt);
        let (request, events) = request(&version, arrival.tenant, arrival.class, &prompt, arrival.max_tokens);
        run.batch.admit(request);
        run.served.push(Served {
            arrival,
            since: run.passes,
            events: Some(events),
        });
    }
    while run.batch.sequences() > 0 {
        run.pass();
    }
    let model = ExactModel::from_checkpoint(&checkpoint).unwrap();
    for Served { arrival, events, .. } in run.served {
        let Some(mut events) = events else { continue };
        let mut tokens = Vec::new();
        let last = loop {
            match events.try_recv().unwrap() {
                SampleEvent::Token(token) => tokens.push(token),
                last => break last,
            }
        };
        assert_eq!(last, SampleEvent::Finished(Finish::Length));
        let expected = alone(&model, &text(arrival.text, arrival.prompt), arrival.max_tokens);
        assert_eq!(tokens.len(), expected.len());
        for (token, expected) in tokens.iter().zip(&expected) {
            let bits = |token: &Token| (token.id, token.logprob.to_bits(), token.candidates);
            assert_eq!(bits(token), bits(expected), "{arrival:?}");
            assert_eq!(
                without_last_layer(&token.routing),
                without_last_layer(&expected.routing),
                "{arrival:?}"
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn parts_copied_prefixes_and_pauses_do_not_change_a_bit(
        arrivals in prop::collection::vec(arrival(), 1..14),
        prompt_tokens in 1_usize..40,
    ) {
        compare("qwen3", &arrivals, prompt_tokens);
        compare("deepseek_v3", &arrivals, prompt_tokens);
    }
}
