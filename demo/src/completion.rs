//! `springtide demo --surface completion`: at each pause a developer asks for a suggestion, judges it
//! and perhaps answers.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, ensure};
use artifact::checkpoint::Checkpoint;
use sqlx::PgPool;
use time::OffsetDateTime;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::sleep,
};
use uuid::Uuid;

use crate::{
    Args, Settings,
    arrivals::Arrival,
    client::{Asker, CONTEXT_CHARS_MAX, Client, Target},
    corpus::tokenizer::CUT,
    developer::{self, Pause},
    progress::{Ended, Run},
    references::{Base, Capability, References, VersionAt, served_along},
    replay::COMPLETIONS_IN_FLIGHT_MAX,
    results::{self, Parameters},
    shuffle::Shuffle,
    stage::{Replayed, Stage, file_url, unless_interrupted, write},
    stats::{Observation, Outcome, Reaction},
    terminal::Display,
};

/// Developers at a pause at one time: asking, thinking, or waiting for an acknowledgement.
const PAUSES_OPEN_MAX: usize = 4096;

/// Replays, waits until every generation has its final disposition, prints the table and writes the
/// report and its page.
pub async fn run(args: Args, settings: Settings, pool: PgPool) -> anyhow::Result<()> {
    let tau = settings.surface.price()?;
    let html = args.report_file(&settings).with_extension("html");
    ensure!(
        html != args.report_file(&settings),
        "--report {}: the page is written there; give a name that ends in .json",
        html.display()
    );
    let stage = Stage::set(args, settings, pool).await?;
    let base = measure_base(&stage, tau).await?;
    let replayed = replay(&stage, tau).await;
    let horizon = Duration::from_secs_f64(stage.settings.surface.horizon_seconds);
    let settled = stage.settle(horizon).await;
    let references = match base {
        Some(base) => references(base, &replayed, &stage).await,
        None => None,
    };

    let parameters = Parameters {
        setup: stage.setup(),
        learning: stage.settings.learning,
        following: stage.settings.following,
        tau,
        silent_share: developer::SILENT_SHARE,
        delay_median_seconds: developer::DELAY_MEDIAN_SECONDS,
        delay_sigma: developer::DELAY_SIGMA,
        completions_in_flight_max: COMPLETIONS_IN_FLIGHT_MAX,
    };
    let mut report = results::collect(&stage, replayed, parameters, settled).await?;
    report.references = references;
    println!("{}", report.table());
    if let Some(references) = &report.references {
        println!("{}", references.table());
    }
    let json = stage.write_json(&report)?;
    write(&html, report.page().as_bytes())?;
    println!("{}", report.summary());
    println!("report: {}", file_url(&html)?);
    println!("        {}", json.display());
    Ok(())
}

/// Tries the base at pauses of users who are not replayed. `None`: no references are wanted.
async fn measure_base(stage: &Stage, tau: f64) -> anyhow::Result<Option<Base>> {
    let args = stage.args.clone();
    if args.reference_pauses == 0 {
        return Ok(None);
    }
    eprintln!("measuring the base at {} pauses of other users", args.reference_pauses);
    let checkpoint = Arc::new(Checkpoint::read_dir(&stage.settings.base)?);
    let (others, first) = (stage.others.clone(), stage.user_parts.len());
    let measured = tokio::task::spawn_blocking(move || Base::measure(checkpoint, (&others, first), &args, tau));
    Ok(Some(measured.await.context("measure the base")??))
}

/// The reference policies on the learning arm's own pauses, and the capability of versions `along` the
/// run. A failure here must not cost the run its report, so it is only logged.
async fn references(base: Base, replayed: &Replayed<Outcome>, stage: &Stage) -> Option<References> {
    let outcomes = replayed.progress.outcomes.clone();
    let run_seconds = stage.length().as_secs_f64();
    let replayed_length = Duration::from_secs_f64(replayed.seconds.min(run_seconds));
    let along = served_along(&outcomes, replayed_length, stage.args.capability_points);
    eprintln!(
        "measuring the reference policies at the learning arm's pauses, and {} versions at those of other users: some \
         minutes (Ctrl-C: leave them out)",
        along.len()
    );
    let base = Arc::new(base);
    let (asked, user_parts) = (base.clone(), stage.user_parts.clone());
    let compare = tokio::task::spawn_blocking(move || asked.compare(&outcomes, &user_parts, run_seconds));
    let mut references = match unless_interrupted(compare).await {
        Some(compared) => match compared.context("measure the references").flatten() {
            Ok(references) => references,
            Err(error) => {
                tracing::warn!(error = format!("{error:#}"), "the report has no reference policies");
                return None;
            }
        },
        None => {
            eprintln!("the report has no reference policies");
            return None;
        }
    };
    for (nth, at) in along.iter().enumerate() {
        let is_last = nth + 1 == along.len();
        match unless_interrupted(capability(&base, *at, &stage.settings)).await {
            Some(Ok(capability)) if is_last => references.capability = Some(capability),
            Some(Ok(capability)) => references.earlier.push(capability),
            Some(Err(error)) => {
                let (error, version) = (format!("{error:#}"), at.version);
                tracing::warn!(error, version, "the report does not say what this version can");
            }
            None => {
                eprintln!("the report does not say what the other versions can");
                break;
            }
        }
    }
    Some(references)
}

/// Loads a version and tries it.
async fn capability(base: &Arc<Base>, at: VersionAt, settings: &Settings) -> anyhow::Result<Capability> {
    let checkpoint = (settings.load_version.0)(at.version).await?;
    let (base, bar) = (base.clone(), settings.following.probability_min);
    let tried = tokio::task::spawn_blocking(move || base.capability(at, &checkpoint, bar));
    tried.await.context("try the version")?
}

/// What all developers share.
struct Product {
    client: Client,
    shuffle: Option<Shuffle>,
    /// Developers who answer also say how much they kept.
    kept: bool,
    /// Developers who answer also send what they typed.
    demonstrations: bool,
}

async fn replay(stage: &Stage, tau: f64) -> Replayed<Outcome> {
    let run = Run {
        length: stage.length(),
        users: stage.user_parts.len(),
        seed: stage.args.seed,
        tau,
    };
    let mut display = Display::new(stage, run);
    let product = Arc::new(Product {
        client: stage.client.clone(),
        shuffle: stage.shuffle(),
        kept: stage.args.kept,
        demonstrations: stage.args.demonstrations,
    });
    let in_flight = Arc::new(Semaphore::new(COMPLETIONS_IN_FLIGHT_MAX));
    let mut sessions = HashMap::<(usize, usize), Uuid>::new();
    let begin = |arrival: Arrival| {
        let permit = Arc::clone(&in_flight).try_acquire_owned().ok()?;
        let pause = developer::pause(&stage.user_parts[arrival.user], run.seed, arrival.user, arrival.nth)?;
        let session = sessions.entry((arrival.user, pause.part.file));
        let asker = stage.asker(&arrival, *session.or_insert_with(Uuid::now_v7));
        Some(play_pause(Arc::clone(&product), asker, arrival, pause, permit))
    };
    stage.replay(PAUSES_OPEN_MAX, &mut display, begin).await
}

async fn play_pause(
    product: Arc<Product>,
    asker: Asker,
    arrival: Arrival,
    pause: Pause,
    permit: OwnedSemaphorePermit,
) -> Ended<Outcome> {
    let client = &product.client;
    let requested_at = Instant::now();
    let prompt = |chars| pause.context(chars).to_owned() + CUT;
    let answer = client.complete(&asker, CONTEXT_CHARS_MAX, prompt).await;
    drop(permit);
    let latency = requested_at.elapsed();
    let (suggestion, prompts_shortened) = match answer {
        Ok(answer) => answer,
        Err(failure) => {
            return Ended {
                outcome: Err(failure),
                prompts_shortened: 0,
                deliveries: Vec::new(),
            };
        }
    };
    let reaction = match suggestion.declined {
        true => Reaction::Declined,
        false => pause.judge(&suggestion.text),
    };
    let mut deliveries = Vec::new();
    let target = Target::Generation(suggestion.generation_id);
    let was_shown = reaction != Reaction::Declined;
    if pause.answers && (was_shown || product.demonstrations) {
        sleep(pause.delay).await;
    }
    if pause.answers && was_shown {
        // The statistics count what developers think; only what they say is permuted.
        let answer = product
            .shuffle
            .as_ref()
            .map_or(reaction, |shuffle| shuffle.swap(reaction));
        let (accept, time) = (answer == Reaction::Right, OffsetDateTime::now_utc());
        if product.kept {
            let kept = pause.kept(&suggestion.text) as f64;
            deliveries.push(client.send_feedback(target, "kept_characters", kept, time).await);
        }
        deliveries.push(client.send_feedback(target, "accept", accept, time).await);
    }
    if pause.answers && product.demonstrations {
        let (typed, time) = (pause.rest().trim_end(), OffsetDateTime::now_utc());
        deliveries.push(client.send_feedback(target, "demonstration", typed, time).await);
    }
    let observation = Observation {
        user: arrival.user,
        answers: pause.answers,
        reaction,
    };
    Ended {
        outcome: Ok(Some(Outcome {
            observation,
            at: arrival.at,
            nth: arrival.nth,
            generation_id: suggestion.generation_id,
            arm: suggestion.arm,
            version: suggestion.version,
            root: suggestion.root,
            latency,
        })),
        prompts_shortened,
        deliveries,
    }
}
