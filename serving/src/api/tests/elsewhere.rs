//! What callers are told, and what is logged, of engines that refuse, fail or are too slow. The
//! engine says a script.

use super::*;
use crate::captured::Lines;
use crate::engine::{Engine, Finish, SampleEvent, SampleRequest, Started, SubmitError, Token};
use event_log::Producer;
use futures::FutureExt as _;

/// Sends every request the same events, and never more. The version of the first one has gone, if they
/// begin with that.
struct Scripted {
    events: Vec<SampleEvent>,
    requests: Arc<Mutex<Vec<SampleRequest>>>,
}

impl Engine for Scripted {
    fn submit(&self, requests: Vec<SampleRequest>) -> Result<(), SubmitError> {
        for request in requests {
            let mut requests = self.requests.lock().unwrap();
            let events = match self.events.split_first() {
                Some((SampleEvent::VersionGone, _)) if requests.is_empty() => &self.events[..1],
                Some((SampleEvent::VersionGone, then)) => then,
                _ => &self.events[..],
            };
            for event in events {
                request.events.try_send(event.clone()).unwrap();
            }
            requests.push(request);
        }
        Ok(())
    }

    fn unavailable(&self, _: &LoadedVersion) -> Option<BoxFuture<'static, ()>> {
        None
    }

    fn stop(&self) {}
}

pub(super) fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<SampleEvent> {
    let token = |id| Token {
        id,
        logprob: -0.5,
        candidates: None,
        routing: router::Routing::default(),
        top: vec![],
    };
    ids.into_iter().map(|id| SampleEvent::Token(token(id))).collect()
}

/// `log`: instead of the fake one.
pub(super) async fn saying(
    events: Vec<SampleEvent>,
    options: Options,
    log: Option<Arc<dyn Log>>,
) -> (Server, Arc<Mutex<Vec<SampleRequest>>>) {
    let mut server = server_with(0, options).await;
    let requests = Arc::default();
    server.router = Router::new();
    let mut api = Arc::into_inner(server.api).unwrap();
    api.engine = Arc::new(Scripted {
        events,
        requests: Arc::clone(&requests),
    });
    api.log = log.unwrap_or(api.log);
    server.api = Arc::new(api);
    server.router = super::super::routes(server.api.clone())
        .protected_by(&edge::auth::Auth::fixed(None), "test")
        .layer(axum::middleware::from_fn(shape_errors));
    (server, requests)
}

/// Waits until every choice is logged or has nothing to log.
pub(super) async fn settle(server: &Server) {
    server.api.choices.close();
    server.api.choices.wait().await;
}

#[tokio::test]
async fn what_an_engine_refuses_is_the_callers_error_with_its_reason_and_what_it_fails_at_is_logged() {
    let lines = Lines::capture();
    let reason = || "it has no top_k: qzcanary7f3a".to_owned();
    for (event, status, told) in [
        (SampleEvent::Refused(reason()), 400, true),
        (SampleEvent::Unusable("no JSON".into()), 502, false),
        (SampleEvent::Busy, 503, false),
        (SampleEvent::Failed("secret".into()), 500, false),
    ] {
        let (server, _) = saying(vec![event], Options::default(), None).await;
        for stream in [false, true] {
            let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2, "stream": stream});
            let (got, problem) = server.complete(body).await;
            assert_eq!(got, status, "{problem}");
            let message = problem["error"]["message"].as_str().unwrap();
            assert_eq!(message.contains("qzcanary7f3a"), told, "{message}");
            assert!(!message.contains("secret"), "{message}");
        }
        let body = json!({"model": "demo", "messages": [{"role": "user", "content": "k"}], "max_tokens": 2});
        let response = server.post_to("/v1/messages", body).await;
        assert_eq!(response.status(), status);
        let answer: Value = serde_json::from_str(&text(response).await).unwrap();
        assert_eq!(answer["type"], "error");
        if told {
            assert_eq!(answer["error"]["type"], "invalid_request_error", "{answer}");
            assert!(answer["error"]["message"].as_str().unwrap().contains("qzcanary7f3a"));
        }
        settle(&server).await;
        let logged = server.log.generations();
        assert_eq!(logged.len(), if [500, 502].contains(&status) { 3 } else { 0 });
        for failed in logged {
            assert_eq!((failed.token_ids.len(), failed.versions[0].tokens), (0, 0));
            assert_eq!(failed.untrainable.as_deref(), Some("engine_failed"));
        }
    }
    // whatever else would keep it from being trained on
    let events = vec![
        SampleEvent::Untrainable("no_token_ids"),
        SampleEvent::Failed("it died".into()),
    ];
    let (server, _) = saying(events, Options::default(), None).await;
    server
        .complete(json!({"model": "demo", "prompt": "a", "max_tokens": 2}))
        .await;
    settle(&server).await;
    let logged = server.log.generations();
    assert_eq!(logged[0].untrainable.as_deref(), Some("engine_failed"));
    let lines = lines.text();
    assert!(lines.contains("request failed"), "{lines}");
    assert!(!lines.contains("qzcanary7f3a"), "{lines}");
}

#[tokio::test]
async fn tokens_that_were_sampled_before_the_engine_failed_are_logged_as_untrainable() {
    let mut events = tokens([1, 2]);
    events.push(SampleEvent::Failed("it died".into()));
    let (server, _) = saying(events, Options::default(), None).await;
    let mut body = json!({"model": "demo", "prompt": "a", "max_tokens": 5});
    assert_eq!(server.complete(body.clone()).await.0, 500);
    body["stream"] = true.into();
    let stream = text(server.post(body).await).await;
    assert!(
        stream.contains("event: error") && !stream.contains("[DONE]"),
        "{stream}"
    );
    settle(&server).await;
    let logged = server.log.generations();
    assert_eq!(logged.len(), 2);
    for failed in logged {
        assert_eq!(failed.token_ids, [1, 2]);
        assert_eq!(failed.finish_reason, FinishReason::Abort);
        assert_eq!(failed.untrainable.as_deref(), Some("engine_failed"));
    }
}

#[tokio::test]
async fn an_answer_that_ends_early_is_trained_on_only_if_one_version_sampled_it() {
    for holds in [true, false] {
        let started = Started {
            engine: "vllm".into(),
            holds: Arc::new(move || async move { holds }.boxed()),
        };
        let mut events = vec![SampleEvent::Started(started)];
        events.extend(tokens([1, 2, 3]));
        let (server, _) = saying(events, Options::default(), None).await;
        let body = json!({"model": "demo", "prompt": "a", "max_tokens": 5, "stop": "c"});
        let (status, answer) = server.complete(body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
        let logged = server.log.generations();
        assert_eq!(logged[0].engine.as_deref(), Some("vllm"));
        let expected = (!holds).then_some("version_unknown");
        assert_eq!(logged[0].untrainable.as_deref(), expected);
    }
}

#[tokio::test]
async fn a_request_whose_version_has_gone_is_routed_again() {
    let mut events = vec![SampleEvent::VersionGone];
    events.extend(tokens([1, 2]));
    events.push(SampleEvent::Finished(Finish::Length));
    let (server, requests) = saying(events, Options::default(), None).await;
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2});
    let (status, answer) = server.complete(body).await;
    assert_eq!(status, 200, "{answer}");
    let requests = requests.lock().unwrap();
    assert_eq!(requests.len(), 2);
    assert_eq!(
        (&requests[0].prompt, requests[0].seed),
        (&requests[1].prompt, requests[1].seed)
    );
    assert_eq!(server.log.generations().len(), 1);
}

#[tokio::test]
async fn the_deadline_ends_the_wait_for_a_prompts_thread() {
    let options = Options {
        prompt_threads: 1,
        ..Options::default()
    };
    let server = server_with(0, options).await;
    let (open, opened) = std::sync::mpsc::channel::<()>();
    let (begins, begun) = tokio::sync::oneshot::channel();
    let (prompts, caller) = (server.api.prompts.clone(), Caller::new("default", None));
    let blocker = tokio::spawn(async move {
        let work = move || {
            let _ = begins.send(());
            opened.recv().map_err(Problem::internal)
        };
        prompts.run(engine::TrafficClass::Production, &caller, work).await
    });
    begun.await.unwrap();
    let chat = json!({"model": "demo", "messages": [{"role": "user", "content": "k"}], "max_tokens": 1});
    let request = Request::post("/v1/chat/completions")
        .header("content-type", "application/json")
        .header(super::super::deadline::HEADER, "100")
        .body(Body::from(chat.to_string()))
        .unwrap();
    assert_eq!(server.router.clone().oneshot(request).await.unwrap().status(), 504);
    open.send(()).unwrap();
    blocker.await.unwrap().unwrap();
}

#[tokio::test]
async fn the_deadline_cuts_off_choices_whose_reader_is_slow() {
    let (server, requests) = saying(tokens(vec![1; 60]), Options::default(), None).await;
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 60, "n": 2, "stream": true,
                      "return_token_ids": true});
    // it has 120 chunks, and nobody reads them
    let response = with_deadline(&server, "300", body).await;
    let requests = std::mem::take(&mut *requests.lock().unwrap());
    for request in &requests {
        request.events.closed().await;
    }
    drop(response);
    settle(&server).await;
    let logged = server.log.generations();
    assert_eq!((requests.len(), logged.len()), (2, 2));
    assert!(logged.iter().all(|one| one.finish_reason == FinishReason::Abort));
}

#[tokio::test]
async fn a_caller_whose_deadline_has_passed_does_not_wait_for_the_log() {
    let (server, _) = saying(tokens([1, 2]), Options::default(), None).await;
    let (acknowledge, delayed) = tokio::sync::oneshot::channel();
    *server.log.delayed.lock().unwrap() = Some(delayed);
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 5});
    assert_eq!(with_deadline(&server, "100", body).await.status(), 504);
    assert!(server.log.generations().is_empty());
    acknowledge.send(()).unwrap();
    settle(&server).await;
    assert_eq!(server.log.generations().len(), 1);
}

#[tokio::test]
async fn an_answer_that_may_still_reach_the_log_takes_feedback() {
    let options = Options {
        log_away: LogAway::Answer,
        ..Options::default()
    };
    // nothing listens there, so nothing acknowledges
    let nobody = event_log::ClientOptions {
        brokers: "127.0.0.1:1".into(),
        librdkafka: [("message.timeout.ms".to_owned(), "200".to_owned())].into(),
        ..event_log::ClientOptions::default()
    };
    let log: Arc<dyn Log> = Arc::new(Producer::new(&nobody).unwrap());
    let mut events = tokens([1, 2]);
    events.push(SampleEvent::Finished(Finish::Length));
    let (server, _) = saying(events, options, Some(log)).await;
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2});
    // the first answer tries the log, and the second does not
    for tried in [true, false] {
        let (status, answer) = server.complete(body.clone()).await;
        assert_eq!(status, 200, "{answer}");
        let choice = answer["choices"][0].as_object().unwrap();
        assert_eq!(choice["captured"], false);
        assert_eq!(choice.contains_key("generation_id"), tried, "{answer}");
        assert_eq!(choice.contains_key("feedback_token"), tried, "{answer}");
    }
}

#[tokio::test]
async fn a_stream_that_waits_long_has_its_headers_and_an_error_then_is_an_event() {
    let options = || Options {
        headers_wait_max: Duration::ZERO,
        ..Options::default()
    };
    let message = json!([{"role": "user", "content": "k"}]);
    for (path, input, failed) in [
        ("/v1/completions", json!({"prompt": "a"}), "event: error"),
        ("/v1/chat/completions", json!({"messages": message}), "event: error"),
        ("/v1/responses", json!({"input": "k"}), "event: response.failed"),
        (
            "/v1/messages",
            json!({"messages": message, "max_tokens": 2}),
            "event: error",
        ),
    ] {
        let (server, requests) = saying(Vec::new(), options(), None).await;
        let mut body = input;
        body["model"] = "demo".into();
        body["stream"] = true.into();
        let response = server.post_to(path, body.clone()).await;
        assert_eq!(response.status(), 200, "{path}");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        let queued = requests.lock().unwrap().pop().unwrap();
        queued.events.try_send(SampleEvent::Expired).unwrap();
        let events = text(response).await;
        assert!(
            events.contains(failed) && events.contains("no slot became free"),
            "{path}: {events}"
        );
        // one that answers goes on as ever
        let response = server.post_to(path, body).await;
        let queued = requests.lock().unwrap().pop().unwrap();
        for event in tokens([1, 2]) {
            queued.events.try_send(event).unwrap();
        }
        let end = SampleEvent::Finished(Finish::Length);
        queued.events.try_send(end).unwrap();
        let events = text(response).await;
        assert!(events.contains("bc") || events.contains("\"b\""), "{path}: {events}");
        settle(&server).await;
        assert_eq!(server.log.generations().len(), 1, "{path}");
    }
    // what is decided soon has its status
    let (server, _) = saying(vec![SampleEvent::Expired], Options::default(), None).await;
    let body = json!({"model": "demo", "prompt": "a", "stream": true});
    assert_eq!(server.complete(body).await.0, 429);
}

#[tokio::test]
async fn what_a_request_asks_to_list_counts_as_its_memory() {
    let (server, requests) = saying(Vec::new(), Options::default(), None).await;
    let auth = edge::auth::Auth::fixed(None);
    let router = super::super::routes(server.api.clone()).protected_within(&auth, "test", 256 << 10);
    let ask = |n: usize, top: usize| {
        let body = json!({"model": "demo", "messages": [{"role": "user", "content": "k"}], "max_tokens": 60,
            "n": n, "logprobs": true, "top_logprobs": top});
        let request = Request::post("/v1/chat/completions").header("content-type", "application/json");
        tokio::spawn(
            router
                .clone()
                .oneshot(request.body(Body::from(body.to_string())).unwrap()),
        )
    };
    // 16 · 60 · 20 of them take more than a tenant's half
    let refused = ask(16, 20).await.unwrap().unwrap();
    assert_eq!(refused.status(), 400);
    let detail = text(refused).await;
    assert!(
        detail.contains("fewer log-probabilities, tokens or choices"),
        "{detail}"
    );
    let waiting = [ask(2, 20), ask(16, 0)];
    while requests.lock().unwrap().len() < 18 {
        tokio::task::yield_now().await;
    }
    let refused = ask(2, 20).await.unwrap().unwrap();
    assert_eq!(refused.status(), 429, "the first one holds most of it");
    for one in waiting {
        one.abort();
    }
}
