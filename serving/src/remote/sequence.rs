//! One sequence on one engine: asks for it, checks each token, passes it on.

use super::vllm::{self, Error, Piece, TokenLogprob, Vllm};
use crate::engine::{Finish, SampleEvent, SampleRequest, Token};
use anyhow::{Context, bail, ensure};
use model::router::Routing;

/// How a sequence ended.
#[derive(Debug)]
pub enum End {
    /// The caller has the last event, or is gone.
    Done,
    /// The engine failed before the first token: another one may answer. The request comes back.
    Retry(Box<SampleRequest>, anyhow::Error),
    /// The engine failed after the first token. The caller has the last event.
    Failed(anyhow::Error),
}

/// Samples `request` on `engine`, which holds the weights named `weights`.
pub async fn run(engine: &Vllm, weights: &str, request: SampleRequest, send_seeds: bool) -> End {
    let events = request.events.clone();
    let mut sent = 0;
    let sampled = async {
        let body = vllm::body(&request, send_seeds);
        let mut stream = engine.generate(&body).await?;
        pass_on(&mut stream, weights, &request, &mut sent).await
    };
    let result = tokio::select! {
        result = sampled => result,
        // dropping the stream aborts the request in the engine
        () = events.closed() => return End::Done,
    };
    let error = match result {
        Ok(()) => return End::Done,
        Err(refused @ Error::Refused(_)) => {
            let _ = events.try_send(SampleEvent::Failed(refused.to_string()));
            return End::Done;
        }
        Err(Error::Engine(error)) => error,
    };
    if sent == 0 {
        return End::Retry(Box::new(request), error);
    }
    let _ = events.try_send(SampleEvent::Failed(format!("{error:#}")));
    End::Failed(error)
}

/// Sends the tokens and the last event. `sent`: tokens so far.
async fn pass_on(
    stream: &mut vllm::Stream,
    weights: &str,
    request: &SampleRequest,
    sent: &mut usize,
) -> Result<(), Error> {
    while let Some(piece) = stream.next().await? {
        let finish = check_and_send(piece, weights, request, sent).map_err(Error::Engine)?;
        if let Some(finish) = finish {
            let _ = request.events.try_send(SampleEvent::Finished(finish));
            return Ok(());
        }
    }
    Err(Error::Engine(anyhow::anyhow!("the engine ended without a reason")))
}

/// Sends the tokens of a piece. Returns why there are no more.
fn check_and_send(
    piece: Piece,
    weights: &str,
    request: &SampleRequest,
    sent: &mut usize,
) -> anyhow::Result<Option<Finish>> {
    let finish = piece.finish_reason.clone();
    if finish.is_some() {
        let spans = piece.weight_versions.iter().flatten();
        let mut spans = spans.filter(|span| span.start < span.end).peekable();
        ensure!(
            spans.peek().is_some(),
            "the engine does not say which weights sampled its tokens"
        );
        for span in spans {
            ensure!(
                span.version == weights,
                "the engine sampled with {:?}, but was probed with {weights:?}",
                span.version
            );
        }
    }
    let mut last = None;
    for token in tokens(piece, request)? {
        last = Some(token.id);
        *sent += 1;
        // the channel has room for every event of a sequence; if it is closed, the caller is gone
        let _ = request.events.try_send(SampleEvent::Token(token));
    }
    Ok(match finish.as_deref() {
        None => None,
        Some("stop") => Some(Finish::Stop(last.context("the engine stopped without a token")?)),
        Some("length") => Some(Finish::Length),
        Some(other) => bail!("the engine ended the sequence: {other}"),
    })
}

/// The tokens of a piece, checked against what was asked for.
fn tokens(piece: Piece, request: &SampleRequest) -> anyhow::Result<Vec<Token>> {
    let logprobs = piece.logprobs.and_then(|logprobs| logprobs.content).unwrap_or_default();
    ensure!(
        logprobs.len() == piece.token_ids.len(),
        "the engine gave {} log-probabilities for {} tokens",
        logprobs.len(),
        piece.token_ids.len()
    );
    let mut masks = piece.sampling_mask.unwrap_or_default().into_iter();
    let ids = piece.token_ids.into_iter();
    ids.zip(logprobs)
        .map(|(id, of)| {
            ensure!(
                id < request.version.vocab && Some(id) != request.suppressed,
                "the engine sampled {id}, which it must not"
            );
            ensure!(
                of.token_id == id,
                "the log-probability of {} came with {id}",
                of.token_id
            );
            // slightly above 0 by rounding
            let logprob = of.logprob.min(0.0);
            ensure!(logprob.is_finite(), "the log-probability of {id} is {logprob}");
            let candidates = masks.next().and_then(|mask| u32::try_from(mask.len()).ok());
            Ok(Token {
                id,
                logprob,
                candidates: candidates.filter(|&count| count > 0),
                routing: Routing::default(),
                top: top(&of, request.top_logprobs),
            })
        })
        .collect()
}

/// The most probable tokens. vLLM puts the sampled one in front, and again in its place.
fn top(token: &TokenLogprob, count: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = token
        .top_logprobs
        .iter()
        .map(|one| (one.token_id, one.logprob))
        .collect();
    top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.dedup_by_key(|(id, _)| *id);
    top.truncate(count);
    top
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::vllm::TopLogprob;

    #[test]
    fn the_most_probable_tokens_come_first_and_once() {
        let one = |token_id, logprob| TopLogprob { token_id, logprob };
        let token = TokenLogprob {
            token_id: 5,
            logprob: -3.0,
            top_logprobs: vec![one(5, -3.0), one(2, -0.1), one(9, -2.5), one(5, -3.0)],
        };
        assert_eq!(top(&token, 3), [(2, -0.1), (9, -2.5), (5, -3.0)]);
        assert_eq!(top(&token, 0), []);
    }
}
