//! Realistic events: generations of 4 to 16 KiB of JSON with token ids and log-probabilities, one
//! in twenty with its prompt by reference, and three feedback events of 1 to 2 KiB about earlier
//! generations per generation. They are prepared in advance; only ids and times are written over
//! placeholders, so that producing the load costs little.

use event_log::event::{
    Event, Feedback, FinishReason, Generation, PayloadRef, Purpose, Target, Value, VersionSpan, now, to_microseconds,
};
use event_log::payload::TOKEN_IDS;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use time::OffsetDateTime;
use uuid::Uuid;

/// A generation and the feedback about it.
pub const EVENTS_PER_GENERATION: u64 = 4;
const TEMPLATES: usize = 64;
/// Tokens of a prompt by reference.
const CONTEXT_TOKENS: usize = 200_000;
/// Feedback is about one of the latest generations, which is a few seconds' worth at typical rates.
const RECENT: usize = 4_096;
const SOURCE: &str = "bench/gateway";
const TIME_PLACEHOLDER: &str = "2026-01-01T00:00:00.000000Z";
const PLACEHOLDER_ID: Uuid = Uuid::from_u128(0x01900000_0000_7000_8000_00000000aaaa);
const PLACEHOLDER_ABOUT: Uuid = Uuid::from_u128(0x01900000_0000_7000_8000_00000000bbbb);

/// A prepared event, as a value and as the text of a batch item.
struct Template {
    event: Event,
    json: Vec<u8>,
    id_at: Vec<usize>,
    about_at: Vec<usize>,
    time_at: usize,
}

/// An endless supply of events with distinct ids.
pub struct Events {
    generations: Vec<Template>,
    feedback: Vec<Template>,
    /// The payloads that some generations reference.
    pub payloads: Vec<Vec<u8>>,
    recent: Vec<Uuid>,
    made: u64,
    random: StdRng,
}

impl Events {
    pub fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut payloads = Vec::new();
        let mut generations = Vec::new();
        for index in 0..TEMPLATES {
            let by_reference = (index % 20 == 7).then(|| context(&mut random));
            generations.push(Template::new(generation(&mut random, by_reference.as_deref())));
            payloads.extend(by_reference);
        }
        let feedback = (0..TEMPLATES).map(|index| Template::new(feedback(&mut random, index)));
        Self {
            generations,
            feedback: feedback.collect(),
            payloads,
            recent: Vec::new(),
            made: 0,
            random: StdRng::seed_from_u64(seed),
        }
    }

    /// Appends the next event as JSON to a batch. Returns its id.
    pub fn append_json(&mut self, batch: &mut Vec<u8>) -> Uuid {
        let (template, id, about) = self.next();
        let start = batch.len();
        batch.extend_from_slice(&template.json);
        let item = &mut batch[start..];
        let mut write = |at: &usize, id: Uuid| {
            id.hyphenated().encode_lower(&mut item[*at..*at + 36]);
        };
        template.id_at.iter().for_each(|at| write(at, id));
        template.about_at.iter().for_each(|at| write(at, about));
        let time = timestamp(now());
        item[template.time_at..template.time_at + time.len()].copy_from_slice(time.as_bytes());
        id
    }

    /// The next event as a record: whether it is a generation, key, bytes and id.
    pub fn encode(&mut self) -> (bool, [u8; 16], Vec<u8>, Uuid) {
        let (template, id, about) = self.next();
        let event = &mut template.event;
        event.id = id.to_string();
        event.time = now();
        let is_generation = match &mut event.body {
            event_log::event::Body::Generation(generation) => {
                generation.id = id;
                generation.episode_id = id;
                true
            }
            event_log::event::Body::Feedback(feedback) => {
                feedback.id = id;
                feedback.target = Target::Generation(about);
                false
            }
            _ => false,
        };
        (is_generation, event.key(), event.encode(), id)
    }

    fn next(&mut self) -> (&mut Template, Uuid, Uuid) {
        let index = self.made;
        self.made += 1;
        let id = Uuid::now_v7();
        if index.is_multiple_of(EVENTS_PER_GENERATION) {
            let slot = (index / EVENTS_PER_GENERATION) as usize;
            if self.recent.len() < RECENT {
                self.recent.push(id);
            } else {
                self.recent[slot % RECENT] = id;
            }
            let which = slot % self.generations.len();
            (&mut self.generations[which], id, id)
        } else {
            let about = self.recent[self.random.random_range(0..self.recent.len())];
            let which = index as usize % self.feedback.len();
            (&mut self.feedback[which], id, about)
        }
    }

    /// Mean sizes of an item's JSON in bytes: generation, feedback.
    pub fn mean_bytes(&self) -> (usize, usize) {
        let mean = |templates: &[Template]| {
            templates.iter().map(|template| template.json.len()).sum::<usize>() / templates.len()
        };
        (mean(&self.generations), mean(&self.feedback))
    }
}

impl Template {
    fn new(event: Event) -> Self {
        let mut item = json!({"source": event.source, "id": event.id, "time": TIME_PLACEHOLDER});
        match &event.body {
            event_log::event::Body::Generation(generation) => item["generation"] = json!(generation),
            event_log::event::Body::Feedback(feedback) => item["feedback"] = json!(feedback),
            _ => {}
        }
        let json = item.to_string().into_bytes();
        let id_at = positions(&json, PLACEHOLDER_ID.to_string().as_bytes());
        let about_at = positions(&json, PLACEHOLDER_ABOUT.to_string().as_bytes());
        let time_at = positions(&json, TIME_PLACEHOLDER.as_bytes())[0];
        Self {
            event,
            json,
            id_at,
            about_at,
            time_at,
        }
    }
}

fn positions(text: &[u8], wanted: &[u8]) -> Vec<usize> {
    let windows = text.windows(wanted.len()).enumerate();
    windows
        .filter(|(_, window)| *window == wanted)
        .map(|(at, _)| at)
        .collect()
}

/// As long as its placeholder.
fn timestamp(time: OffsetDateTime) -> String {
    let (year, month, day) = time.to_calendar_date();
    let (hour, minute, second, micro) = time.to_hms_micro();
    let month = u8::from(month);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micro:06}Z")
}

/// The token ids of a long prompt.
fn context(random: &mut StdRng) -> Vec<u8> {
    let ids = (0..CONTEXT_TOKENS).map(|_| random.random_range(0..150_000_u32));
    ids.flat_map(u32::to_le_bytes).collect()
}

fn generation(random: &mut StdRng, by_reference: Option<&[u8]>) -> Event {
    // 6 bytes of JSON per prompt token and 16 per sampled token give 4 to 16 KiB.
    let (prompt, sampled) = match by_reference {
        Some(_) => (0, random.random_range(190..400)),
        None => (random.random_range(300..1_000), random.random_range(100..500)),
    };
    let mut ids = |count: u32| -> Vec<u32> { (0..count).map(|_| random.random_range(0..150_000)).collect() };
    let (prompt_ids, token_ids) = (ids(prompt), ids(sampled));
    let logprobs = token_ids.iter().map(|_| -random.random_range(0.001_f32..6.0)).collect();
    let generation = Generation {
        id: PLACEHOLDER_ID,
        episode_id: PLACEHOLDER_ID,
        segment: 0,
        turn: 0,
        parent_id: None,
        policy: "demo".to_owned(),
        line: "realtime-7f3a".to_owned(),
        versions: vec![VersionSpan {
            version: 17,
            root: [9; 32],
            tokens: sampled,
        }],
        replica: "replica-1".to_owned(),
        purpose: Purpose::Production,
        run_id: None,
        task_id: None,
        group_id: None,
        surface: "completion".to_owned(),
        user_key: format!("user-{}", random.random_range(0..10_000)),
        arm: "champion".to_owned(),
        arm_probability: 0.6,
        prompt_prefix: None,
        prompt_ids,
        token_ids,
        logprobs,
        train_mask: None,
        payload: by_reference.map(|bytes| PayloadRef::of(bytes, TOKEN_IDS)),
        experts: None,
        temperature: 1.0,
        top_p: 1.0,
        seed: Some(random.random()),
        finish_reason: FinishReason::Stop,
        declined: false,
        shown: Some(true),
        consent: true,
        decline_suppressed: false,
        exploration_share: Some(0.02),
        sampling: None,
        untrainable: None,
        engine: None,
        proof: None,
    };
    generation.into_event("default", SOURCE)
}

fn feedback(random: &mut StdRng, index: usize) -> Event {
    let mut words = |bytes: usize| -> String {
        std::iter::repeat_with(|| random.random_range(b'a'..=b'z') as char)
            .take(bytes)
            .collect()
    };
    let (metric_name, value) = match index % 3 {
        0 => ("accept", Value::Bool(index.is_multiple_of(2))),
        1 => ("kept", Value::Float(0.5)),
        _ => ("comment", Value::Text(words(900))),
    };
    let tags = (0..6).map(|tag| (format!("editor.context.{tag}"), words(if tag < 2 { 90 } else { 120 })));
    let feedback = Feedback {
        id: PLACEHOLDER_ID,
        target: Target::Generation(PLACEHOLDER_ABOUT),
        metric_name: metric_name.to_owned(),
        value,
        tags: tags.collect(),
    };
    let mut event = feedback.into_event("default", SOURCE, to_microseconds(now()));
    event.id = PLACEHOLDER_ID.to_string();
    event
}
