//! Answers that must follow a schema: engines may not know schemas, or end too early.

use super::*;
use crate::api::tests::agents::{END, VOCAB, tokenizer};
use crate::engine::Constraint;

/// A server that gives every request this answer, token ids of bytes, and stops.
async fn says(text: &'static str) -> String {
    let ids: Vec<u32> = text.bytes().map(u32::from).chain([END]).collect();
    let logprobs = vec![-0.5; ids.len()];
    let choice = json!({"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "stop"});
    let answer = format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [choice]}));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let router = Router::new().route("/v1/completions", post(move || async { answer }));
    tokio::spawn(async move { axum::serve(listener, router).await });
    url
}

#[tokio::test]
async fn an_answer_that_is_not_of_its_schema_fails_and_its_engine_goes_on() {
    let schema = Arc::new(json!({
        "type": "object", "required": ["a"], "additionalProperties": false, "properties": {"a": {"const": 1}},
    }));
    for (text, expected) in [
        ("{\"a\":1}", None),
        ("{\"a\"", Some("before the answer was whole")),
        ("hello", Some("did not keep to the schema")),
    ] {
        let server = OpenAiServer {
            url: says(text).await,
            ..OpenAiServer::default()
        };
        let options = Options {
            openai: vec![server],
            ..Options::default()
        };
        let pool = Pool::new(&options, 4, config(4)).unwrap();
        pool.set_state(0, State::Serving(7), None);
        let mut version = Arc::into_inner(crate::routing::tests::version(7)).unwrap();
        version.vocab = VOCAB;
        version.stop_ids = vec![END];
        let constraint = Constraint {
            schema: schema.clone(),
            matcher: tokenizer().constrain(&schema).unwrap(),
        };
        let (sender, mut events) = mpsc::channel(events_max(16));
        let request = SampleRequest {
            version: Arc::new(version),
            prompt: Arc::new([1, 2, 3]),
            max_tokens: 16,
            params: Params::default(),
            seed: 0,
            suppressed: None,
            constraint: Some(constraint),
            ends: Default::default(),
            score_prompt: None,
            top_logprobs: 0,
            caller: Caller::new("default", None),
            class: TrafficClass::Production,
            priority: 0,
            session: None,
            events: sender,
            submitted: Instant::now(),
        };
        pool.submit(vec![request]).unwrap();
        let mut last = None;
        while let Some(event) = events.recv().await {
            last = Some(event);
        }
        match (last, expected) {
            (Some(SampleEvent::Finished(finish)), None) => assert_eq!(finish, Finish::Stop(END)),
            (Some(SampleEvent::Unusable(reason)), Some(expected)) => assert!(reason.contains(expected), "{reason}"),
            (last, _) => panic!("{text}: {last:?}"),
        }
        assert_eq!(pool.state(0), State::Serving(7), "{text}");
    }
}
