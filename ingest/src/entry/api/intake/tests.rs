use async_compression::tokio::write::{GzipEncoder, ZstdEncoder};
use axum::body::Bytes;
use axum::routing::post;
use edge::auth::{Principal, Role};
use tokio::io::AsyncWriteExt;
use tower::ServiceExt;

use super::*;

const BYTES_MAX: usize = 64 * 1024;

fn options() -> Options {
    Options {
        request_bytes_max: BYTES_MAX,
        request_read_seconds_max: 0.2,
        in_flight_bytes_max: 4 * BYTES_MAX,
        ..Options::default()
    }
}

/// Returns the length of the body that reached the handler.
fn router(intake: &Intake) -> Router {
    let router = Router::new().route("/", post(async |body: Bytes| body.len().to_string()));
    intake.clone().guard(router)
}

fn request(tenant: &str, encoding: Option<&str>, body: Body) -> Request {
    let principal = Principal::with_role(tenant, Role::Serving, "");
    let mut request = Request::post("/").extension(principal);
    if let Some(encoding) = encoding {
        request = request.header("content-encoding", encoding);
    }
    request.body(body).unwrap()
}

async fn send(intake: &Intake, encoding: Option<&str>, body: impl Into<Body>) -> (u16, String) {
    let response = router(intake)
        .oneshot(request("default", encoding, body.into()))
        .await
        .unwrap();
    let status = response.status().as_u16();
    let body = axum::body::to_bytes(response.into_body(), BYTES_MAX).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

async fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzipEncoder::new(Vec::new());
    encoder.write_all(bytes).await.unwrap();
    encoder.shutdown().await.unwrap();
    encoder.into_inner()
}

async fn zstd(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = ZstdEncoder::new(Vec::new());
    encoder.write_all(bytes).await.unwrap();
    encoder.shutdown().await.unwrap();
    encoder.into_inner()
}

#[tokio::test]
async fn a_body_arrives_decompressed() {
    let intake = Intake::new(&options());
    let text = "springtide ".repeat(1_000);
    let length = text.len().to_string();
    assert_eq!(send(&intake, None, text.clone()).await, (200, length.clone()));
    assert_eq!(
        send(&intake, Some("identity"), text.clone()).await,
        (200, length.clone())
    );
    let compressed = gzip(text.as_bytes()).await;
    assert!(compressed.len() < text.len() / 10);
    assert_eq!(send(&intake, Some("gzip"), compressed).await, (200, length.clone()));
    let compressed = zstd(text.as_bytes()).await;
    assert_eq!(send(&intake, Some("zstd"), compressed).await, (200, length));
    assert_eq!(intake.held_bytes(), 0, "an answered request holds nothing");
}

#[tokio::test]
async fn a_decompression_bomb_is_refused_while_it_decompresses() {
    let intake = Intake::new(&options());
    let zeros = vec![0; 64 * 1024 * 1024];
    for (encoding, bomb) in [("gzip", gzip(&zeros).await), ("zstd", zstd(&zeros).await)] {
        let (status, answer) = send(&intake, Some(encoding), bomb).await;
        assert_eq!(status, 413, "{encoding}: {answer}");
        assert!(answer.contains("too-large"), "{answer}");
    }
    assert_eq!(intake.held_bytes(), 0, "a refused request holds nothing");
}

#[tokio::test]
async fn a_body_of_exactly_the_limit_is_accepted_and_one_byte_more_is_refused() {
    let intake = Intake::new(&options());
    assert_eq!(send(&intake, None, vec![b'x'; BYTES_MAX]).await.0, 200);
    assert_eq!(send(&intake, None, vec![b'x'; BYTES_MAX + 1]).await.0, 413);
    let compressed = gzip(&[b'x'; BYTES_MAX]).await;
    assert_eq!(send(&intake, Some("gzip"), compressed).await.0, 200);
    let compressed = gzip(&[b'x'; BYTES_MAX + 1]).await;
    assert_eq!(send(&intake, Some("gzip"), compressed).await.0, 413);
}

#[tokio::test]
async fn compressed_bytes_that_decompress_to_nothing_are_limited_too() {
    let intake = Intake::new(&options());
    // zstd's skippable frames: magic 0x184D2A50, length, ignored bytes.
    let mut frame = vec![0x50, 0x2A, 0x4D, 0x18, 0x00, 0x04, 0x00, 0x00];
    frame.resize(8 + 1024, 0);
    let nothing = frame.repeat(2 * BYTES_MAX / 1024);
    let (status, answer) = send(&intake, Some("zstd"), nothing).await;
    assert_eq!(status, 413, "{answer}");
}

#[tokio::test]
async fn an_unknown_encoding_is_a_415_that_names_the_supported_ones() {
    let intake = Intake::new(&options());
    for encoding in ["br", "gzip, gzip", "compress"] {
        let response = router(&intake)
            .oneshot(request("default", Some(encoding), Body::from("x")))
            .await
            .unwrap();
        assert_eq!(response.status(), 415, "{encoding}");
        assert_eq!(response.headers()["accept-encoding"], "gzip, zstd");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
    }
    let mut twice = request("default", Some("gzip"), Body::from("x"));
    twice
        .headers_mut()
        .append("content-encoding", HeaderValue::from_static("gzip"));
    assert_eq!(router(&intake).oneshot(twice).await.unwrap().status(), 415);
}

#[tokio::test]
async fn malformed_compressed_bytes_are_a_400() {
    let intake = Intake::new(&options());
    for encoding in ["gzip", "zstd"] {
        let (status, answer) = send(&intake, Some(encoding), "this is neither").await;
        assert_eq!(status, 400, "{encoding}: {answer}");
    }
    let mut cut = gzip(b"half of it").await;
    cut.truncate(cut.len() / 2);
    assert_eq!(send(&intake, Some("gzip"), cut).await.0, 400);
}

#[tokio::test]
async fn a_declared_length_beyond_the_limit_is_refused_unread() {
    let intake = Intake::new(&options());
    let mut declared = request("default", None, stalled());
    declared
        .headers_mut()
        .insert("content-length", HeaderValue::from(BYTES_MAX + 1));
    assert_eq!(router(&intake).oneshot(declared).await.unwrap().status(), 413);
}

#[tokio::test]
async fn a_body_that_never_arrives_times_out() {
    let intake = Intake::new(&options());
    assert_eq!(send(&intake, None, stalled()).await.0, 408);
    assert_eq!(intake.held_bytes(), 0);
}

/// A body that never yields a byte.
fn stalled() -> Body {
    Body::from_stream(futures::stream::pending::<Result<Bytes, std::convert::Infallible>>())
}
