//! Downloads a part of an object: one range, with retries when the connection stalls or breaks.

use std::ops::Range;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use object_store::{Error, GetOptions, GetRange, ObjectStore, path::Path};

/// A connection that returns no bytes for this long is closed.
const STALL: Duration = Duration::from_secs(20);
const TRIES: u32 = 6;
const PAUSE: Duration = Duration::from_millis(100);

/// Why a part was not downloaded.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{0}")]
    Store(#[from] Error),
    #[error("no bytes for {} s", STALL.as_secs())]
    Stalled,
    #[error("{found} bytes were received, not {expected}")]
    Length { found: u64, expected: u64 },
    #[error("its bytes are not the object's")]
    Damaged,
}

impl Failure {
    /// Whether another try may succeed. Damage may have happened in transit.
    fn is_transient(&self) -> bool {
        match self {
            Self::Store(error) => is_transient(error),
            Self::Stalled | Self::Length { .. } | Self::Damaged => true,
        }
    }
}

pub(super) fn is_transient(error: &Error) -> bool {
    !matches!(
        error,
        Error::NotFound { .. }
            | Error::Unauthenticated { .. }
            | Error::PermissionDenied { .. }
            | Error::NotSupported { .. }
    )
}

/// The bytes of `range`, if `verify` accepts them.
pub(super) async fn part(
    store: &dyn ObjectStore,
    key: &Path,
    range: Range<u64>,
    verify: impl Fn(&[u8]) -> bool,
) -> Result<Bytes, Failure> {
    let mut tries = 0;
    loop {
        let failure = match once(store, key, range.clone()).await {
            Ok(bytes) if verify(&bytes) => return Ok(bytes),
            Ok(_) => Failure::Damaged,
            Err(failure) => failure,
        };
        tries += 1;
        if tries == TRIES || !failure.is_transient() {
            return Err(failure);
        }
        tracing::debug!(%key, start = range.start, error = %failure, "retrying the download of a part");
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
    let mut chunks = timeout(store.get_opts(key, options)).await??.into_stream();
    let mut bytes = BytesMut::new();
    while let Some(chunk) = timeout(chunks.next()).await? {
        bytes.extend_from_slice(&chunk?);
        // Stop early, so that memory stays bounded.
        if bytes.len() as u64 > expected {
            break;
        }
    }
    match bytes.len() as u64 {
        found if found == expected => Ok(bytes.freeze()),
        found => Err(Failure::Length { found, expected }),
    }
}

async fn timeout<T>(work: impl Future<Output = T>) -> Result<T, Failure> {
    tokio::time::timeout(STALL, work).await.map_err(|_| Failure::Stalled)
}
