//! Engines that quote the request, as Python servers do in their errors. What they quote is for the
//! caller who asked, and never in a log.

use super::*;
use crate::captured::Lines;
use crate::remote::recorded;

/// The server's own part of its errors.
const CANARY: &str = "qzcanary7f3a";
/// No port, version or duration of these tests.
const PROMPT: [u32; 4] = [1717, 1911, 1203, 1887];

/// How the server answers a request to sample, with the request's text.
type Answer = fn(String) -> Response;

fn stream(event: &Value) -> Response {
    format!("data: {event}\n\n").into_response()
}

/// Answers, and whether the caller is told why.
const ANSWERS: [(&str, bool, Answer); 8] = [
    ("400", true, |body| (StatusCode::BAD_REQUEST, body).into_response()),
    ("413", true, |body| {
        (StatusCode::PAYLOAD_TOO_LARGE, body).into_response()
    }),
    ("429", false, |body| {
        (StatusCode::TOO_MANY_REQUESTS, body).into_response()
    }),
    ("500", false, |body| {
        (StatusCode::INTERNAL_SERVER_ERROR, body).into_response()
    }),
    ("400 in the stream", true, |body| {
        stream(&json!({"error": {"message": body, "code": 400}}))
    }),
    ("500 in the stream", false, |body| {
        stream(&json!({"error": {"message": body, "code": 500}}))
    }),
    ("an ending", false, |body| {
        let choice = json!({"index": 0, "text": "", "finish_reason": body});
        let meta = json!({"finish_reason": {"type": body}});
        stream(&json!({"choices": [choice], "meta_info": meta}))
    }),
    ("no event", false, |body| {
        stream(&json!({"choices": body, "meta_info": body}))
    }),
];

async fn serve(answer: Answer) -> String {
    let quote = move |body: String| async move { answer(format!("{CANARY} {body}")) };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, Router::new().fallback(quote)).await });
    url
}

#[tokio::test]
async fn what_an_engine_quotes_reaches_its_caller_at_most_and_no_log() {
    let lines = Lines::capture();
    for (name, told, answer) in ANSWERS {
        let url = serve(answer).await;
        let server = || Server {
            url: url.clone(),
            ..Server::default()
        };
        let openai = OpenAiServer {
            url: url.clone(),
            ..OpenAiServer::default()
        };
        let engines = [
            (vec![server()], vec![], vec![]),
            (vec![], vec![server()], vec![]),
            (vec![], vec![], vec![openai]),
        ];
        for (vllm, sglang, openai) in engines {
            let options = Options {
                vllm,
                sglang,
                openai,
                ..Options::default()
            };
            let pool = Pool::new(&options, 4, config(4)).unwrap();
            pool.set_state(0, State::Serving(7), Some("springtide-7-bb"));
            let (mut request, mut events) = recorded::request(8);
            request.prompt = Arc::new(PROMPT);
            let version = request.version.clone();
            pool.submit(vec![request]).unwrap();
            // an engine that fails gives the request back to the queue, which is dropped here
            let event = loop {
                match events.try_recv() {
                    Ok(SampleEvent::Started(_)) => {}
                    Ok(event) => break Some(event),
                    Err(_) if pool.state(0) == State::Down => break None,
                    Err(_) => tokio::time::sleep(Duration::from_millis(2)).await,
                }
            };
            match event {
                Some(SampleEvent::Refused(reason)) => {
                    assert!(told && reason.contains(CANARY), "{name}: {reason}");
                }
                Some(other) => assert!(!told && !format!("{other:?}").contains(CANARY), "{name}: {other:?}"),
                None => assert!(!told, "{name}"),
            }
            let ejected = pool.state(0) == State::Down;
            let is_failure = ["500", "500 in the stream", "no event"].contains(&name);
            assert_eq!(ejected, is_failure, "{name} of {:?}", pool.client(0).kind());
            assert_eq!(pool.unavailable(&version).is_some(), ejected);
        }
    }
    let lines = lines.text();
    assert!(
        lines.contains("engine ejected") && lines.contains("cannot be used"),
        "{lines}"
    );
    assert!(!lines.contains(CANARY), "{lines}");
    for id in PROMPT {
        assert!(!lines.contains(&format!("{id},")), "{lines}");
    }
}
