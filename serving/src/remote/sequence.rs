//! One sequence on one engine: asks for it, checks each token, passes it on.

use super::client::Client;
use super::http::Error;
use super::pool::Updates;
use super::protocol::{Ending, Piece, Stream, VersionOfTokens};
use crate::engine::{Finish, SampleEvent, SampleRequest, Token, TokensOfVersion};
use anyhow::{Context, ensure};
use std::sync::atomic::{AtomicUsize, Ordering};
use text::constraint::Matcher;
use tokio_util::sync::CancellationToken;

/// The code of answers whose engine returned no token ids.
pub const NO_TOKEN_IDS: &str = "no_token_ids";

const NOT_OF_SCHEMA: &str = "the engine did not keep to the schema of the answer, or the schema is too hard to check";

/// How a sequence ended.
#[derive(Debug)]
pub enum End {
    /// The caller has the last event, or is gone.
    Done,
    /// The engine failed before the first token: another one may answer. The request comes back.
    Retry(Box<SampleRequest>, anyhow::Error),
    /// The engine holds other weights, and has sampled nothing. The request comes back.
    OtherWeights(Box<SampleRequest>),
    /// Its slot was taken back. What is left of the request comes back.
    TakenBack(Box<SampleRequest>),
    /// Its slot was taken back, and nothing else can continue it. The caller has the last event: its
    /// tokens are of no use.
    Lost(usize),
    /// There was no first token in time. The request comes back.
    Late(Box<SampleRequest>),
    /// The engine failed after the first token. The caller has the last event.
    Failed(anyhow::Error),
}

/// Samples `request` on `engine`, which holds the weights named `weights`. `crossing`: the request may
/// go on when the engine gets other weights. `taking`: of background sequences.
pub async fn run(
    engine: &Client,
    weights: &str,
    request: SampleRequest,
    send_seeds: bool,
    crossing: Option<&Updates>,
    taking: Option<&Taking>,
) -> End {
    let events = request.events.clone();
    if request.score_prompt.is_some() {
        let reason = "the engine of this model gives no log-probabilities of prompts: ask without prompt_logprobs, \
                      and for echo without logprobs";
        let _ = events.try_send(SampleEvent::Refused(reason.into()));
        return End::Done;
    }
    let mut sent = Sent::default();
    let sampled = async {
        let mut stream = engine.generate(&request, weights, send_seeds).await?;
        if engine.vouched_alias().is_some() {
            let _ = events.try_send(SampleEvent::Untrainable(NO_TOKEN_IDS));
        }
        pass_on(engine, &mut stream, weights, &request, &mut sent, crossing, taking).await
    };
    let result = tokio::select! {
        result = sampled => result,
        // dropping the stream aborts the request in the engine
        () = events.closed() => return End::Done,
        () = wanted_back(taking) => return give_back(engine, weights, request, &sent, crossing, taking).await,
    };
    // a request that an engine cannot answer says nothing of the engine, and another would not either
    let of_request = |event| {
        let _ = events.try_send(event);
        End::Done
    };
    let error = match result {
        Ok(()) => return End::Done,
        Err(Error::Refused(reason)) => return of_request(SampleEvent::Refused(reason)),
        Err(Error::Busy) => return of_request(SampleEvent::Busy),
        Err(Error::Answer(reason)) => {
            tracing::warn!(engine = engine.url(), reason, "an answer cannot be used");
            metrics::counter!("springtide_remote_answers_unusable_total").increment(1);
            return of_request(SampleEvent::Unusable(reason.into()));
        }
        Err(Error::Late) => return End::Late(Box::new(request)),
        Err(Error::OtherWeights) => return End::OtherWeights(Box::new(request)),
        Err(absent @ Error::Absent(_)) => absent.into(),
        Err(Error::Engine(error)) => error,
    };
    if sent.ids.is_empty() {
        return End::Retry(Box::new(request), error);
    }
    let _ = events.try_send(SampleEvent::Failed(format!("{error:#}")));
    End::Failed(error)
}

/// How a background sequence is told to give its slot back, and what it shows of its progress.
#[derive(Default)]
pub struct Taking {
    pub wanted: CancellationToken,
    /// Tokens so far.
    pub sampled: AtomicUsize,
    /// The engine's updates, to know which weights sampled them.
    pub updates: Option<Updates>,
}

/// The tokens of a sequence so far.
#[derive(Debug, Default)]
struct Sent {
    ids: Vec<u32>,
}

async fn wanted_back(taking: Option<&Taking>) {
    match taking {
        Some(taking) => taking.wanted.cancelled().await,
        None => std::future::pending().await,
    }
}

/// What is left to do of a sequence that was aborted. Nothing else may continue one whose sampling
/// depends on more than its tokens, or whose tokens may be of several versions.
async fn give_back(
    engine: &Client,
    weights: &str,
    mut request: SampleRequest,
    sent: &Sent,
    crossing: Option<&Updates>,
    taking: Option<&Taking>,
) -> End {
    let sampled = sent.ids.len();
    if sampled == 0 {
        return End::TakenBack(Box::new(request));
    }
    let depends_on_more = request.constraint.is_some() || request.params.has_penalties();
    let one_version = match taking.and_then(|taking| taking.updates.as_ref()) {
        Some(updates) => updates.hold(weights).await,
        None => false,
    };
    let left = request.max_tokens.saturating_sub(sampled);
    if depends_on_more || !one_version || crossing.is_some() || engine.vouched_alias().is_some() || left == 0 {
        let _ = request.events.try_send(SampleEvent::Displaced);
        return End::Lost(sampled);
    }
    request.prompt = request.prompt.iter().chain(&sent.ids).copied().collect();
    request.max_tokens = left;
    request.ends.min_tokens = request.ends.min_tokens.saturating_sub(sampled);
    // the same seed would draw the same numbers again
    request.seed = next_seed(request.seed);
    End::TakenBack(Box::new(request))
}

/// Another seed below 2^63.
fn next_seed(seed: u64) -> u64 {
    // the multiplier of Knuth's MMIX
    seed.wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407)
        >> 1
}

/// Sends the tokens and the last event. `sent`: tokens so far.
async fn pass_on(
    engine: &Client,
    stream: &mut Stream,
    weights: &str,
    request: &SampleRequest,
    sent: &mut Sent,
    crossing: Option<&Updates>,
    taking: Option<&Taking>,
) -> Result<(), Error> {
    let mut matcher = request.constraint.as_ref().map(|constraint| constraint.matcher.clone());
    while let Some(piece) = stream.next().await? {
        let ending = piece.ending;
        if let Some(updates) = crossing
            && !updates.proven().await
        {
            let error = anyhow::anyhow!("the engine failed its probe after an update");
            return Err(Error::Engine(error));
        }
        if ending.is_some() {
            let others = piece
                .versions
                .as_deref()
                .filter(|spans| spans.iter().any(|span| span.version != weights));
            match (crossing, others) {
                (Some(updates), Some(spans)) => {
                    let sampled = sent.ids.len() + piece.tokens.len();
                    let versions = cross(updates, spans, sampled).await.map_err(Error::Engine)?;
                    let _ = request.events.try_send(SampleEvent::Versions(versions));
                }
                _ => check_versions(engine, weights, piece.versions.as_deref())
                    .await
                    .map_err(Error::Engine)?,
            }
        }
        let last = check_and_send(piece, request, matcher.as_mut(), sent)?;
        if let Some(taking) = taking {
            taking.sampled.store(sent.ids.len(), Ordering::Relaxed);
        }
        let Some(ending) = ending else { continue };
        let finish = match ending {
            Ending::Length => Finish::Length,
            Ending::Stop => last
                .map(Finish::Stop)
                .context("the engine stopped without a token")
                .map_err(Error::Engine)?,
        };
        let _ = request.events.try_send(SampleEvent::Finished(finish));
        return Ok(());
    }
    Err(Error::Engine(anyhow::anyhow!("the engine ended without a reason")))
}

/// Checks and sends the tokens of a piece. Returns the last one.
fn check_and_send(
    piece: Piece,
    request: &SampleRequest,
    mut matcher: Option<&mut Matcher>,
    sent: &mut Sent,
) -> Result<Option<u32>, Error> {
    let mut last = None;
    for mut token in piece.tokens {
        let id = token.id;
        check(&token, request, sent.ids.len()).map_err(Error::Engine)?;
        if let Some(matcher) = &mut matcher
            && !request.version.stop_ids.contains(&id)
        {
            // also if the schema asks too much of our matcher
            matcher.accept(id).map_err(|_| Error::Answer(NOT_OF_SCHEMA))?;
        }
        token.top.truncate(request.top_logprobs);
        last = Some(id);
        sent.ids.push(id);
        // the channel has room for every event of a sequence; if it is closed, the caller is gone
        let _ = request.events.try_send(SampleEvent::Token(token));
    }
    if piece.ending == Some(Ending::Stop)
        && let Some(matcher) = matcher
        && !matcher.may_end().unwrap_or(false)
    {
        return Err(Error::Answer(
            "the engine stopped before the answer was whole JSON of its schema",
        ));
    }
    Ok(last)
}

/// Fails if no engine that works would send this token. `sent`: tokens before it.
fn check(token: &Token, request: &SampleRequest, sent: usize) -> anyhow::Result<()> {
    ensure!(
        token.id < request.version.vocab && Some(token.id) != request.suppressed,
        "the engine sampled a token that it must not"
    );
    ensure!(
        token.logprob.is_finite(),
        "the engine gave a log-probability that is no number"
    );
    ensure!(
        sent < request.max_tokens,
        "the engine sampled more than the {} tokens that were asked for",
        request.max_tokens
    );
    Ok(())
}

/// The versions of an answer that crossed updates. Fails unless they cover its tokens, in order, and
/// all are known.
async fn cross(updates: &Updates, spans: &[VersionOfTokens], sampled: usize) -> anyhow::Result<Vec<TokensOfVersion>> {
    let mut versions = Vec::new();
    let mut end = 0;
    for span in spans.iter().filter(|span| span.start < span.end) {
        ensure!(
            span.start == end,
            "the engine says nothing of the weights that sampled the tokens {end} to {}",
            span.start
        );
        end = span.end;
        let known = updates.version(&span.version).await;
        let (serial, root) =
            known.with_context(|| format!("the engine sampled with unknown weights, {:?}", span.version))?;
        versions.push(TokensOfVersion {
            serial,
            root,
            tokens: span.end - span.start,
        });
    }
    ensure!(
        end == sampled,
        "the engine names the weights of {end} tokens, and sampled {sampled}"
    );
    Ok(versions)
}

/// Fails unless the weights that were probed sampled all tokens. `versions`: what the engine said of
/// this answer. One that says nothing must still have the same weights.
async fn check_versions(engine: &Client, weights: &str, versions: Option<&[VersionOfTokens]>) -> anyhow::Result<()> {
    let names: Vec<String> = match versions {
        Some(spans) => {
            let sampled = spans.iter().filter(|span| span.start < span.end);
            sampled.map(|span| span.version.clone()).collect()
        }
        None if engine.names_weights() => engine.weights_name().await?.into_iter().collect(),
        None => return Ok(()),
    };
    ensure!(
        !names.is_empty(),
        "the engine does not say which weights sampled its tokens"
    );
    match names.iter().find(|name| *name != weights) {
        Some(other) => anyhow::bail!("the engine sampled with {other:?}, but was probed with {weights:?}"),
        None => Ok(()),
    }
}
