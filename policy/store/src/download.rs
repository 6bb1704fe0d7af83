//! One part of an object from the store: a range, read while bytes keep coming, tried again when they stop.

use std::ops::Range;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use object_store::{GetOptions, GetRange, ObjectStore, path::Path};

/// A connection that brings nothing for this long is given up.
const STALL: Duration = Duration::from_secs(20);
const TRIES: u32 = 6;
const PAUSE: Duration = Duration::from_millis(100);

/// Why a part did not arrive.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{0}")]
    Store(#[from] object_store::Error),
    #[error("nothing came for {} s", STALL.as_secs())]
    Stalled,
    #[error("{found} bytes came, not {expected}")]
    Length { found: u64, expected: u64 },
    #[error("its bytes are not the object's")]
    Damaged,
}

impl Failure {
    /// Whether another try may do better. Also for what was damaged: it may have been on the way.
    fn may_pass(&self) -> bool {
        !matches!(
            self,
            Self::Store(
                object_store::Error::NotFound { .. }
                    | object_store::Error::Unauthenticated { .. }
                    | object_store::Error::PermissionDenied { .. }
                    | object_store::Error::NotSupported { .. }
            )
        )
    }
}

/// The bytes of `range`, once `good` takes them.
pub(super) async fn part(
    store: &dyn ObjectStore,
    key: &Path,
    range: Range<u64>,
    good: impl Fn(&[u8]) -> bool,
) -> Result<Bytes, Failure> {
    let mut tries = 0;
    loop {
        let failure = match once(store, key, range.clone()).await {
            Ok(bytes) if good(&bytes) => return Ok(bytes),
            Ok(_) => Failure::Damaged,
            Err(failure) => failure,
        };
        tries += 1;
        if tries == TRIES || !failure.may_pass() {
            return Err(failure);
        }
        tracing::debug!(%key, start = range.start, error = %failure, "a part did not arrive, will be tried again");
        tokio::time::sleep(PAUSE * 2u32.pow(tries)).await;
    }
}

async fn once(store: &dyn ObjectStore, key: &Path, range: Range<u64>) -> Result<Bytes, Failure> {
    if range.is_empty() {
        return Ok(Bytes::new());
    }
    let expected = range.end - range.start;
    let options = GetOptions {
        range: Some(GetRange::Bounded(range)),
        ..GetOptions::default()
    };
    let found = timely(store.get_opts(key, options)).await??;
    let mut chunks = found.into_stream();
    // No larger than a part.
    let mut bytes = BytesMut::new();
    while let Some(chunk) = timely(chunks.next()).await? {
        let chunk = chunk?;
        if (bytes.len() + chunk.len()) as u64 > expected {
            let found = (bytes.len() + chunk.len()) as u64;
            return Err(Failure::Length { found, expected });
        }
        bytes.extend_from_slice(&chunk);
    }
    match bytes.len() as u64 {
        found if found == expected => Ok(bytes.freeze()),
        found => Err(Failure::Length { found, expected }),
    }
}

async fn timely<T>(work: impl Future<Output = T>) -> Result<T, Failure> {
    tokio::time::timeout(STALL, work).await.map_err(|_| Failure::Stalled)
}
