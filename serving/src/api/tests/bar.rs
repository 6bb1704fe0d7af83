//! Arms that show only probable texts: what is answered and what is logged. The engine says a script,
//! in which every token has the log-probability −0.5.

use super::elsewhere::{saying, settle, tokens};
use super::*;
use crate::engine::{Finish, SampleEvent};

impl Server {
    /// All users are in the arm `champion`, which has this bar. Version 1 answers a share `shadow` of
    /// their requests, too.
    fn set_bar(&self, min: f64, explore: f64, shadow: f64) {
        let loaded = self.api.routes.served().into_iter();
        let versions = loaded.map(|(version, _)| (version.serial, version)).collect();
        let mut barred = assignment(6, &[("champion", 7), ("canary", 1)], &[("champion", 1.0)]);
        barred.arms[0].probability_min = Some(min);
        barred.arms[0].explore = explore;
        barred.shadow = shadow;
        self.api.routes.apply(barred, versions);
    }
}

fn said(ids: &[u32], finish: Finish) -> Vec<SampleEvent> {
    let mut events = tokens(ids.iter().copied());
    events.push(SampleEvent::Finished(finish));
    events
}

/// A text of three tokens, whose probability is 0.22.
fn whole_text() -> Vec<SampleEvent> {
    said(&[1, 2, END], Finish::Stop(END))
}

#[tokio::test]
async fn a_text_below_the_bar_is_not_shown_and_is_logged_as_it_was_sampled() {
    for (min, shown) in [(0.25, false), ((-1.5f64).exp(), true), (0.2, true)] {
        let (server, _) = saying(whole_text(), Options::default(), None).await;
        server.set_bar(min, 0.0, 0.0);
        let body = json!({"model": "demo", "prompt": "a", "max_tokens": 9, "logprobs": 1, "return_token_ids": true});
        let (status, answer) = server.complete(body).await;
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        assert_eq!(
            (choice["text"].as_str(), choice["declined"].as_bool()),
            (Some(if shown { "bc" } else { "" }), Some(!shown)),
            "{min}"
        );
        let seen = if shown { vec![1, 2, END] } else { vec![] };
        assert_eq!(choice["token_ids"], json!(seen), "{min}");
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), seen.len());
        assert_eq!(choice["stop_reason"], if shown { END } else { DECLINE });
        assert_eq!(answer["usage"]["completion_tokens"], 3);
        let logged = &server.log.generations()[0];
        assert_eq!(
            (&*logged.token_ids, &*logged.logprobs),
            (&[1, 2, END][..], &[-0.5; 3][..])
        );
        assert_eq!((logged.declined, logged.shown), (!shown, (!shown).then_some(false)));
        assert_eq!(logged.finish_reason, FinishReason::Stop);
    }
}

#[tokio::test]
async fn a_text_that_is_held_back_is_answered_as_a_decline_is() {
    let of_choice = json!({"model": "demo", "prompt": "a", "max_tokens": 3});
    let of_chat = json!({"model": "demo", "messages": [{"role": "user", "content": "k"}], "max_tokens": 3});
    let of_response = json!({"model": "demo", "input": "k", "max_output_tokens": 3});
    for (path, body) in [
        ("/v1/completions", &of_choice),
        ("/v1/chat/completions", &of_chat),
        ("/v1/responses", &of_response),
        ("/v1/messages", &of_chat),
    ] {
        let mut answers = Vec::new();
        for events in [
            said(&[1, 2, DECLINE], Finish::Stop(DECLINE)),
            said(&[1, 2, 3], Finish::Length),
        ] {
            let (server, _) = saying(events, Options::default(), None).await;
            server.set_bar(0.25, 0.0, 0.0);
            let answer = text(server.post_to(path, body.clone()).await).await;
            let mut answer: Value = serde_json::from_str(&answer).unwrap();
            // of every answer its own
            for place in ["", "/choices/0", "/output/0"] {
                let object = answer.pointer_mut(place).and_then(Value::as_object_mut);
                let Some(object) = object else { continue };
                for field in ["id", "created", "created_at", "generation_id", "feedback_token"] {
                    object.remove(field);
                }
            }
            assert!(answer.to_string().contains(r#""declined":true"#), "{answer}");
            answers.push(answer);
            assert!(server.log.generations()[0].declined);
        }
        assert_eq!(answers[0], answers[1], "{path}");
    }
}

#[tokio::test]
async fn a_stream_waits_for_the_bar_and_then_has_the_whole_text_or_nothing() {
    let body = json!({"model": "demo", "messages": [{"role": "user", "content": "k"}], "max_tokens": 9,
                      "stream": true, "logprobs": true});
    for (min, chunks, content, tokens) in [(0.0, 4, "bc", 3), (0.2, 1, "bc", 3), (0.25, 1, "", 0)] {
        let (server, _) = saying(whole_text(), Options::default(), None).await;
        server.set_bar(min, 0.0, 0.0);
        let stream = text(server.post_to("/v1/chat/completions", body.clone()).await).await;
        let mut events = data(&stream);
        assert_eq!(events.pop(), Some(json!("[DONE]")), "{stream}");
        assert_eq!(events.len(), chunks, "{stream}");
        let choices = || events.iter().map(|event| &event["choices"][0]);
        let text: String = choices()
            .filter_map(|choice| choice["delta"]["content"].as_str())
            .collect();
        let logprobs = choices().map(|choice| choice["logprobs"]["content"].as_array().unwrap().len());
        assert_eq!((&*text, logprobs.sum::<usize>()), (content, tokens), "{stream}");
        let last = choices().next_back().unwrap();
        assert_eq!(
            (&last["declined"], &last["finish_reason"]),
            (&json!(tokens == 0), &json!("stop"))
        );
        assert_eq!(server.log.generations()[0].token_ids, [1, 2, END]);
    }
}

#[tokio::test]
async fn every_choice_of_a_request_reaches_the_bar_for_itself() {
    let (server, requests) = saying(vec![], Options::default(), None).await;
    server.set_bar(0.5, 0.0, 0.0);
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 2, "n": 2});
    let sample = async {
        while requests.lock().unwrap().len() < 2 {
            tokio::task::yield_now().await;
        }
        for (request, ids) in requests.lock().unwrap().iter().zip([&[1, 2][..], &[1][..]]) {
            for event in said(ids, Finish::Length) {
                request.events.try_send(event).unwrap();
            }
        }
    };
    let ((_, answer), ()) = tokio::join!(server.complete(body), sample);
    let choices = answer["choices"].as_array().unwrap().iter();
    let told: Vec<_> = choices
        .map(|choice| (choice["text"].as_str().unwrap(), choice["declined"] == true))
        .collect();
    assert_eq!(told, [("", true), ("b", false)], "{answer}");
}

#[tokio::test]
async fn what_must_not_decline_is_shown_whatever_its_probability() {
    let (server, _) = saying(whole_text(), Options::default(), None).await;
    server.set_bar(0.9, 0.5, 0.0);
    for _ in 0..64 {
        let (_, answer) = server
            .complete(json!({"model": "demo", "prompt": "a", "max_tokens": 9}))
            .await;
        let logged = server.log.generations().pop().unwrap();
        assert_eq!(answer["choices"][0]["declined"], !logged.decline_suppressed);
        assert_eq!(logged.declined, !logged.decline_suppressed);
    }
    let logged = server.log.generations();
    let explored = logged.iter().filter(|one| one.decline_suppressed).count();
    assert!(explored > 0 && explored < 64, "{explored}");
}

#[tokio::test]
async fn only_users_have_the_bar_of_their_arm_and_what_failed_has_not_declined() {
    let evaluation = json!({"purpose": "evaluation"});
    for (model, metadata, declined) in [
        ("demo", json!({}), true),
        ("demo@champion", json!({}), true),
        ("demo@7", json!({}), false),
        ("demo", evaluation, false),
    ] {
        let (server, _) = saying(whole_text(), Options::default(), None).await;
        server.set_bar(0.9, 0.0, 0.0);
        let body = json!({"model": model, "prompt": "a", "max_tokens": 9, "metadata": metadata});
        let (_, answer) = server.complete(body).await;
        assert_eq!(answer["choices"][0]["declined"], declined, "{model} {metadata}");
    }
    let mut events = tokens([1, 2]);
    events.push(SampleEvent::Failed("it died".into()));
    let (server, _) = saying(events, Options::default(), None).await;
    server.set_bar(0.9, 0.0, 0.0);
    let body = json!({"model": "demo", "prompt": "a", "max_tokens": 9});
    assert_eq!(server.complete(body).await.0, 500);
    settle(&server).await;
    let failed = &server.log.generations()[0];
    assert_eq!((failed.declined, failed.finish_reason), (false, FinishReason::Abort));
}

#[tokio::test]
async fn an_unseen_answer_has_the_bar_of_the_answer_that_it_repeats() {
    let (server, _) = saying(whole_text(), Options::default(), None).await;
    server.set_bar(0.25, 0.0, 1.0);
    server
        .complete(json!({"model": "demo", "prompt": "a", "max_tokens": 9}))
        .await;
    settle(&server).await;
    let logged = server.log.generations();
    let mut declined: Vec<(&str, bool)> = logged.iter().map(|one| (&*one.arm, one.declined)).collect();
    declined.sort_unstable();
    assert_eq!(declined, [("champion", true), ("shadow", true)]);
}
