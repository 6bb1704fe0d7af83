//! When a gateway says that it is unhealthy because no engine answers.

use super::*;
use crate::engine::{Engine, SampleRequest, SubmitError};

/// Names the versions that no engine serves.
struct Away(Arc<Mutex<Vec<i64>>>);

impl Engine for Away {
    fn submit(&self, _: Vec<SampleRequest>) -> Result<(), SubmitError> {
        Ok(())
    }

    fn unavailable(&self, version: &LoadedVersion) -> Option<BoxFuture<'static, ()>> {
        let away = self.0.lock().unwrap().contains(&version.serial);
        away.then(|| Box::pin(std::future::pending()) as BoxFuture<'static, ()>)
    }

    fn stop(&self) {}
}

#[test]
fn engines_count_as_lost_after_ten_seconds_without_one() {
    let (lost, start) = (Lost::default(), Instant::now());
    let after = |ms| start + Duration::from_millis(ms);
    for (at_ms, is_lost, for_long) in [
        (0, true, false),
        (9_999, true, false),
        (10_000, true, true),
        (10_001, false, false),
        (10_002, true, false),
        (20_001, true, false),
        (20_002, true, true),
    ] {
        assert_eq!(lost.for_long(is_lost, after(at_ms)), for_long, "at {at_ms} ms");
    }
}

#[tokio::test]
async fn a_gateway_is_unhealthy_once_no_arm_has_had_an_engine_for_long() {
    let mut server = server().await;
    server.router = Router::new();
    let mut api = Arc::into_inner(server.api).unwrap();
    let away = Arc::new(Mutex::new(vec![]));
    api.engine = Arc::new(Away(Arc::clone(&away)));
    server.api = Arc::new(api);
    server.router = super::super::routes(server.api.clone())
        .protected_by(&edge::auth::Auth::fixed(None), "test")
        .layer(axum::middleware::from_fn(shape_errors));
    let long_ago = Instant::now().checked_sub(LOST_MAX).unwrap();
    let mut since = [None, Some(long_ago), None, Some(long_ago), None].into_iter();
    for (versions, status) in [
        (vec![], 200),
        (vec![7], 200),
        (vec![1, 7], 200),
        (vec![1, 7], 503),
        (vec![1], 200),
    ] {
        away.lock().unwrap().clone_from(&versions);
        *server.api.lost.0.lock().unwrap() = since.next().unwrap();
        let (got, health) = server.get("/health").await;
        assert_eq!(got, status, "without engines for {versions:?}: {health}");
        if status == 200 {
            assert_eq!(health["without_engine"], json!(versions), "{health}");
        }
    }
    // an engine for one arm was enough to count anew
    away.lock().unwrap().push(7);
    assert_eq!(server.get("/health").await.0, 200);
}
