//! Asks the trainer on this replica's machine whether it computes, over its own HTTP address. This
//! goes on beside the looks, so that a slow trainer delays none of them.
//!
//! One request is always open. The trainer answers it when its state changes, or after half a second.

use super::controller::Trainer;
use serde::Deserialize;
use std::time::Duration;
use tokio::sync::watch;

/// A trainer that does not answer for so long may compute.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
/// Between an answer and the next request.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(250);

/// `GET /computing`.
#[derive(Debug, Deserialize)]
struct Answer {
    computing: bool,
}

/// Watches the trainer at `url` until the receiver is dropped. Before the first answer it is silent.
pub fn watch(url: &str, client: reqwest::Client) -> watch::Receiver<Trainer> {
    let (state, receiver) = watch::channel(Trainer::Silent);
    let url = format!("{}/computing", url.trim_end_matches('/'));
    tokio::spawn(async move {
        tokio::select! {
            () = state.closed() => {}
            never = ask(&url, &client, &state) => match never {},
        }
    });
    receiver
}

async fn ask(url: &str, client: &reqwest::Client, state: &watch::Sender<Trainer>) -> std::convert::Infallible {
    let mut is_warned = false;
    loop {
        let known = *state.borrow();
        let pause = match next(url, client, known).await {
            Ok(next) => {
                if is_warned {
                    tracing::info!(url, "the trainer answers again");
                    is_warned = false;
                }
                set(state, next);
                PAUSE
            }
            Err(error) => {
                set(state, Trainer::Silent);
                if !is_warned {
                    tracing::warn!(
                        error = format!("{:#}", anyhow::Error::from(error)),
                        url,
                        "the trainer does not say whether it computes: nothing is lent until it does; start it, or \
                         correct serve.tide.beside_trainer"
                    );
                    is_warned = true;
                }
                PAUSE_AFTER_ERROR
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn next(url: &str, client: &reqwest::Client, known: Trainer) -> reqwest::Result<Trainer> {
    let mut request = client.get(url).timeout(ANSWER_TIMEOUT);
    if known != Trainer::Silent {
        request = request.query(&[("known", known == Trainer::Computes)]);
    }
    let answer: Answer = request.send().await?.error_for_status()?.json().await?;
    Ok(match answer.computing {
        true => Trainer::Computes,
        false => Trainer::Waits,
    })
}

fn set(state: &watch::Sender<Trainer>, next: Trainer) {
    state.send_if_modified(|now| std::mem::replace(now, next) != next);
}
