//! Looks at the engines every second, and when a trainer beside them begins or ends to compute; lends,
//! and reports to the control role. The decisions are in `controller`; this has the clock and the
//! network. Without the control role it goes on lending, and keeps the last hours for it.

use super::controller::{Controller, Decision, Sample, Trainer};
use super::minute::{self, MINUTES_MAX, Minute, Report, USES_MAX, Use};
use super::options::Options;
use super::trainer;
use crate::engine::Engine;
use crate::engine::caller::Work;
use crate::engine::load::{Felt, Limit, Load, Totals, Used};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use time::{Date, OffsetDateTime};
use tokio::sync::watch;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const LOOK_INTERVAL: Duration = Duration::from_secs(1);
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// Lends the slots of one replica.
pub struct Tide {
    pub options: Options,
    pub policy: String,
    pub replica: String,
    /// Of each engine.
    pub slots: usize,
    /// Of them, slots that are never lent.
    pub floor: usize,
    pub engine: Arc<dyn Engine>,
    /// Asks the trainer, if one is on this machine.
    pub client: reqwest::Client,
    /// Where it reports to, if anywhere.
    pub control: Option<Control>,
}

/// The control role, as a replica reaches it.
#[derive(Clone)]
pub struct Control {
    pub url: String,
    pub api_key: Option<String>,
    pub client: reqwest::Client,
}

/// `GET /v1/tide/{id}/history`: five minutes of one engine, in order of time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Remembered {
    pub engine: i16,
    #[serde(with = "time::serde::rfc3339")]
    pub at: OffsetDateTime,
    pub production_peak: i32,
    pub lent_slot_seconds: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Past {
    pub past: Vec<Remembered>,
}

/// What is known of one engine.
struct Watched {
    controller: Controller,
    /// Slots that may be used since the latest look.
    lent: usize,
    seen: Totals,
    minute: Minute,
    /// The day, and what had been used when it began.
    day: (Date, BTreeMap<Work, Used>),
}

/// The past, if it was asked for.
type Exchanged = reqwest::Result<Option<Past>>;

struct Running {
    tide: Tide,
    trainer: watch::Receiver<Trainer>,
    process: Uuid,
    watched: Vec<Watched>,
    looked: OffsetDateTime,
    /// The look before the latest report.
    reported: OffsetDateTime,
    /// Minutes that are over and were not reported.
    over: VecDeque<Minute>,
    /// Days that are over, of which the last counts were not reported.
    days_over: Vec<Use>,
    /// Whether the past has been asked for.
    remembers: bool,
    connected: bool,
}

impl Tide {
    /// Lends until `shutdown`. Then everything that production leaves is lent.
    pub async fn run(self, shutdown: CancellationToken) {
        let now = OffsetDateTime::now_utc();
        let loads = self.engine.loads();
        let watched = (0..).zip(&loads).map(|(engine, load)| Watched {
            controller: self.controller(),
            lent: usize::MAX,
            seen: load.totals.clone(),
            minute: Minute::new(engine, self.slots, now),
            day: (now.date(), load.totals.work.clone()),
        });
        let mut running = Running {
            watched: watched.collect(),
            process: Uuid::now_v7(),
            looked: now,
            reported: now,
            over: VecDeque::new(),
            days_over: Vec::new(),
            remembers: self.control.is_none(),
            connected: true,
            trainer: match &self.options.beside_trainer {
                Some(url) => trainer::watch(url, self.client.clone()),
                None => watch::channel(Trainer::Absent).1,
            },
            tide: self,
        };
        let mut looks = tokio::time::interval(LOOK_INTERVAL);
        let mut reports = tokio::time::interval(REPORT_INTERVAL);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        reports.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut trainer = running.trainer.clone();
        // a slow control role must not keep slots from production
        let mut exchange: Option<BoxFuture<'static, Exchanged>> = None;
        loop {
            let exchanged = async {
                match &mut exchange {
                    Some(exchange) => exchange.await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = shutdown.cancelled() => break,
                // an error: there is no trainer to watch
                Ok(()) = trainer.changed() => running.look(OffsetDateTime::now_utc()),
                _ = looks.tick() => running.look(OffsetDateTime::now_utc()),
                done = exchanged => {
                    exchange = None;
                    running.exchanged(done);
                }
                _ = reports.tick() => {
                    if exchange.is_none() {
                        exchange = running.exchange();
                    }
                }
            }
        }
        running.look(OffsetDateTime::now_utc());
        running.remembers = true;
        if let Some(last) = running.exchange() {
            let _ = last.await;
        }
        running.tide.engine.lend(&vec![Limit::default(); running.watched.len()]);
    }

    fn controller(&self) -> Controller {
        Controller::new(self.slots, self.floor, self.options.clone())
    }
}

impl Running {
    fn look(&mut self, now: OffsetDateTime) {
        let took = now - self.looked;
        self.looked = now;
        let loads = self.tide.engine.loads();
        let (slots, trainer) = (self.tide.slots, *self.trainer.borrow());
        let mut limits = Vec::with_capacity(loads.len());
        for (engine, (watched, load)) in self.watched.iter_mut().zip(&loads).enumerate() {
            let sample = sample(load, &watched.seen, trainer);
            let decided = watched.controller.look(now, sample);
            let decision = self.tide.options.enabled.then_some(decided);
            if watched.minute.minute != minute::start(now) {
                let over = std::mem::replace(&mut watched.minute, Minute::new(engine, slots, now));
                self.over.push_back(over);
                if self.over.len() > MINUTES_MAX / 2 {
                    self.over.pop_front();
                }
            }
            watched
                .minute
                .add(took, &sample, load, &watched.seen, watched.lent, decision.as_ref());
            if watched.day.0 != now.date() {
                let uses = uses(engine, &watched.day, &watched.seen);
                self.days_over.extend(uses.into_iter().take(USES_MAX / 2));
                watched.day = (now.date(), watched.seen.work.clone());
            }
            watched.seen.clone_from(&load.totals);
            show(engine, slots, &sample, decision.as_ref());
            limits.push(decision.map_or_else(Limit::default, |decision| Limit {
                slots: decision.slots,
                whole: decision.whole,
            }));
        }
        self.keep_one_for_production(&loads, &mut limits);
        for (watched, limit) in self.watched.iter_mut().zip(&limits) {
            watched.lent = limit.slots;
        }
        self.tide.engine.lend(&limits);
    }

    /// Of several engines that could be lent whole at once, one stays for production.
    fn keep_one_for_production(&self, loads: &[Load], limits: &mut [Limit]) {
        let serves = |load: &Load| load.serves;
        let all_whole = loads
            .iter()
            .zip(limits.iter())
            .filter(|(load, _)| serves(load))
            .all(|(_, limit)| limit.whole);
        if !all_whole {
            return;
        }
        if let Some((_, first)) = loads.iter().zip(limits.iter_mut()).find(|(load, _)| serves(load)) {
            first.whole = false;
            first.slots = first.slots.saturating_sub(self.tide.floor);
        }
    }

    /// Reports, and asks for the past unless that is known. `None`: there is nobody to report to.
    fn exchange(&mut self) -> Option<BoxFuture<'static, Exchanged>> {
        let control = self.tide.control.clone()?;
        let (replica, report, remembers) = (self.tide.replica.clone(), self.report(), self.remembers);
        self.reported = self.looked;
        let exchange = async move {
            let past = match remembers {
                true => None,
                false => Some(control.past(&replica).await?),
            };
            control.report(&replica, &report).await?;
            Ok(past)
        };
        Some(exchange.boxed())
    }

    fn report(&self) -> Report {
        let mut minutes: Vec<Minute> = self.over.iter().cloned().collect();
        minutes.extend(self.watched.iter().map(|watched| watched.minute.clone()));
        let mut all = self.days_over.clone();
        for (engine, watched) in self.watched.iter().enumerate() {
            all.extend(uses(engine, &watched.day, &watched.seen));
        }
        all.truncate(USES_MAX);
        Report {
            policy: self.tide.policy.clone(),
            process: self.process,
            history_days: self.tide.options.history_days,
            minutes,
            uses: all,
        }
    }

    fn exchanged(&mut self, exchanged: Exchanged) {
        match &exchanged {
            Err(error) if self.connected => tracing::warn!(%error, "the use of slots is not reported"),
            Ok(_) if !self.connected => tracing::info!("the use of slots is reported again"),
            _ => {}
        }
        self.connected = exchanged.is_ok();
        let Ok(past) = exchanged else { return };
        let (minute, day) = (minute::start(self.reported), self.reported.date());
        self.over.retain(|over| over.minute >= minute);
        self.days_over.retain(|over| over.day >= day);
        if let Some(past) = past {
            self.remember(&past);
        }
    }

    /// Begins anew with what earlier processes saw.
    fn remember(&mut self, past: &Past) {
        self.remembers = true;
        for watched in &mut self.watched {
            let mut controller = self.tide.controller();
            let of_engine = past.past.iter().filter(|one| one.engine == watched.minute.engine);
            for one in of_engine {
                controller.remember(one.at, f64::from(one.production_peak), one.lent_slot_seconds);
            }
            watched.controller = controller;
        }
        tracing::info!(intervals = past.past.len(), "earlier use of slots is known");
    }
}

impl Control {
    async fn past(&self, replica: &str) -> reqwest::Result<Past> {
        let answer = self.send(self.client.get(self.url(replica, "/history"))).await?;
        answer.json().await
    }

    async fn report(&self, replica: &str, report: &Report) -> reqwest::Result<()> {
        self.send(self.client.post(self.url(replica, "")).json(report))
            .await
            .map(drop)
    }

    fn url(&self, replica: &str, rest: &str) -> String {
        format!("{}/v1/tide/{replica}{rest}", self.url.trim_end_matches('/'))
    }

    async fn send(&self, mut request: reqwest::RequestBuilder) -> reqwest::Result<reqwest::Response> {
        if let Some(key) = &self.api_key {
            request = request.bearer_auth(key);
        }
        request.send().await?.error_for_status()
    }
}

/// What happened since the look before.
fn sample(load: &Load, seen: &Totals, trainer: Trainer) -> Sample {
    let slot_seconds = |totals: &Totals, of_production: bool| {
        let work = totals.work.iter();
        let work = work.filter(|(work, _)| (**work == Work::Production) == of_production);
        work.map(|(_, used)| used.slot_seconds).sum::<f64>()
    };
    let since =
        |of_production| (slot_seconds(&load.totals, of_production) - slot_seconds(seen, of_production)).max(0.0);
    Sample {
        production: load.production,
        production_waiting: load.production_waiting,
        background: load.background,
        production_slot_seconds: since(true),
        lent_slot_seconds: since(false),
        first_token: mean_first_token(&load.totals.beside, &seen.beside),
        has_substitute: load.has_substitute,
        trainer,
    }
}

fn mean_first_token(now: &Felt, before: &Felt) -> Option<Duration> {
    let count = now.first_tokens - before.first_tokens;
    let seconds = now.first_token_seconds - before.first_token_seconds;
    (count > 0).then(|| Duration::from_secs_f64((seconds / count as f64).max(0.0)))
}

/// What the engine was used for on a day, so far.
fn uses(engine: usize, (day, begun): &(Date, BTreeMap<Work, Used>), totals: &Totals) -> Vec<Use> {
    let zero = Used::default();
    let before = |work| begun.get(work).unwrap_or(&zero);
    let changed = totals.work.iter().filter(|(work, used)| before(work) != *used);
    changed
        .map(|(work, used)| Use::between(engine, *day, *work, used, before(work)))
        .collect()
}

fn show(engine: usize, slots: usize, sample: &Sample, decision: Option<&Decision>) {
    let engine = engine.to_string();
    let lent = decision.map_or(slots, |decision| decision.slots);
    metrics::gauge!("springtide_tide_lendable_slots", "engine" => engine.clone()).set(lent as f64);
    metrics::gauge!("springtide_tide_background_slots", "engine" => engine.clone()).set(sample.background as f64);
    metrics::gauge!("springtide_tide_production_slots", "engine" => engine.clone()).set(sample.production as f64);
    let expected = decision.and_then(|decision| decision.expected).unwrap_or(f64::NAN);
    metrics::gauge!("springtide_tide_expected_slots", "engine" => engine.clone()).set(expected);
    metrics::counter!("springtide_tide_slot_milliseconds_total", "engine" => engine)
        .increment((sample.lent_slot_seconds * 1e3) as u64);
}
