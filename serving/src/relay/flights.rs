//! Equal requests that come at the same time are one request of the upstream. So the upstream's load
//! does not grow with the number of followers. No answer is kept after it has been given.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use edge::problem::Problem;
use futures::FutureExt as _;
use futures::future::{BoxFuture, WeakShared};
use object_store::path::Path;

type Answer = Result<Bytes, Problem>;

#[derive(Clone, Default)]
pub(super) struct Flights {
    by_key: Arc<Mutex<HashMap<Path, WeakShared<BoxFuture<'static, Answer>>>>>,
}

impl Flights {
    /// The answer of a request for `key` that is under way, otherwise that of `request`.
    pub(super) async fn join(&self, key: &Path, request: impl Future<Output = Answer> + Send + 'static) -> Answer {
        let flight = {
            let mut by_key = self.by_key.lock().unwrap_or_else(PoisonError::into_inner);
            let under_way = by_key.get(key).and_then(WeakShared::upgrade);
            under_way.filter(|flight| flight.peek().is_none()).unwrap_or_else(|| {
                let flight = request.boxed().shared();
                by_key.retain(|_, flight| flight.upgrade().is_some());
                by_key.extend(flight.downgrade().map(|flight| (key.clone(), flight)));
                flight
            })
        };
        flight.await
    }
}
