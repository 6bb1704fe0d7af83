//! Versions that several machines publish together: each codes and uploads a share of the delta, and reports it; one puts the
//! reports together, and publishes a version as [`publish_external`](super::publish_external) does.
//!
//! Nobody has the whole of either version in memory, so no image and no quantised copy comes of it.

use std::collections::BTreeMap;
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use policy::delta::{self, Report, Share};
use policy::manifest::{Manifest, Parent, Shard};
use policy::sign::{Envelope, SigningKey, TrustedKeys};
use policy::store::{self, Pieces, Store};
use serde::{Deserialize, Serialize};
use time::OffsetDateTime;

use super::external::{commit, line_of};
use super::{Error, Publisher, Timings};

/// What is published, and where.
#[derive(Debug, Clone)]
pub struct Shares {
    /// Under which the shares were put.
    pub name: String,
    /// How many there are.
    pub of: usize,
    /// Made where it is not there.
    pub line: String,
    /// The version that the shares begin at: the line's head, or what a new line begins on.
    pub parent: i64,
    /// The parent's files, and the version's: those that it does not have stay the parent's.
    pub base: BTreeMap<String, Bytes>,
    pub files: BTreeMap<String, Bytes>,
}

/// What one machine says of its share, signed: who can write into the store alone can neither change nor move it.
#[derive(Debug, Serialize, Deserialize)]
struct Signed {
    policy: String,
    name: String,
    /// From 1.
    shard: usize,
    of: usize,
    /// [`Report::to_bytes`] in base64.
    report: String,
}

/// The kind in the envelope's payload type.
const KIND: &str = "share";

/// Uploads a share and what it reports, of share `shard` of `of`, from 0. Once more is harmless; another one under the same name is
/// refused, for shares of two attempts do not make a version.
pub async fn put_share(
    store: &Store,
    key: &SigningKey,
    policy: &str,
    (name, shard, of): (&str, usize, usize),
    share: &Share,
) -> Result<(), Error> {
    match get_report(store, &key.trusted(), policy, (name, shard, of)).await {
        Ok(Some(before)) if before.shard().object != share.report.shard().object => {
            return Err(Error::Share {
                name: name.into(),
                shard: shard + 1,
                of,
                reason: "it was made before, from other weights: give every attempt a name of its own".into(),
            });
        }
        // what another machine signed, or nobody, is replaced
        Ok(_) | Err(Error::Share { .. }) => {}
        Err(error) => return Err(error),
    }
    store.put_object(policy, &share.object).await?;
    let signed = Signed {
        policy: policy.into(),
        name: name.into(),
        shard: shard + 1,
        of,
        report: BASE64.encode(share.report.to_bytes()),
    };
    let unreadable = |reason: String| Error::Share {
        name: name.into(),
        shard: shard + 1,
        of,
        reason,
    };
    let payload = serde_json::to_vec(&signed).map_err(|error| unreadable(error.to_string()))?;
    let envelope = Envelope::sign(KIND, &payload, key).to_bytes();
    let envelope: Bytes = envelope.map_err(|error| unreadable(error.to_string()))?.into();
    store
        .put_private(&report_key(policy, name, shard, of), &envelope)
        .await?;
    Ok(())
}

/// What one machine reported of its share; none where it did not.
async fn get_report(
    store: &Store,
    trusted: &TrustedKeys,
    policy: &str,
    (name, shard, of): (&str, usize, usize),
) -> Result<Option<Report>, Error> {
    let envelope = match store.get_private(&report_key(policy, name, shard, of)).await {
        Err(store::Error::NotFound(_)) => return Ok(None),
        envelope => envelope?,
    };
    let read = || -> Result<Report, String> {
        let envelope = Envelope::from_bytes(&envelope).map_err(|error| error.to_string())?;
        let payload = envelope.verify(KIND, trusted).map_err(|error| error.to_string())?;
        let signed: Signed = serde_json::from_slice(&payload).map_err(|error| error.to_string())?;
        if (signed.policy.as_str(), signed.name.as_str(), signed.shard, signed.of) != (policy, name, shard + 1, of) {
            return Err(format!(
                "it is share {} of {} of `{}`",
                signed.shard, signed.of, signed.name
            ));
        }
        let report = BASE64.decode(&signed.report).map_err(|error| error.to_string())?;
        Report::from_bytes(&report).map_err(|error| error.to_string())
    };
    let report = read().map_err(|reason| Error::Share {
        name: name.into(),
        shard: shard + 1,
        of,
        reason,
    })?;
    Ok(Some(report))
}

/// What one machine reported of its share, whose object is there.
async fn get_share(publisher: &Publisher, name: &str, shard: usize, of: usize) -> Result<Report, Error> {
    let (store, policy) = (&publisher.store, publisher.policy.as_str());
    if let Some(report) = get_report(store, &publisher.trusted, policy, (name, shard, of)).await?
        && store.is_there(policy, &report.shard().object).await?
    {
        return Ok(report);
    }
    Err(Error::NoShare {
        name: name.into(),
        shard: shard + 1,
        of,
    })
}

/// Publishes the version that all shares make together.
pub async fn publish_shares(publisher: &Publisher, shares: Shares) -> Result<(Manifest, Timings), Error> {
    let Shares {
        name,
        of,
        line,
        parent,
        base,
        mut files,
    } = shares;
    let (known, stand) = line_of(publisher, &line, parent).await?;
    let started = Instant::now();
    let (store, policy) = (&publisher.store, publisher.policy.as_str());
    let mut reports = vec![];
    for shard in 0..of {
        reports.push(get_share(publisher, &name, shard, of).await?);
    }
    for (name, bytes) in &base {
        files.entry(name.clone()).or_insert_with(|| bytes.clone());
    }
    let delta_shards = reports.iter().map(Report::shard).collect::<Vec<_>>();
    let joined = tokio::task::spawn_blocking(move || delta::join(&reports, &base, &files)).await??;
    let header = joined.header;
    if header.base != known.root {
        return Err(Error::OtherBase {
            parent,
            root: known.root,
            found: header.base,
        });
    }
    if header.base == header.result {
        return Err(Error::Unchanged(parent));
    }
    let (head, own) = (Bytes::from(joined.head), Bytes::from(joined.files));
    let (head, own) = tokio::task::spawn_blocking(move || (Pieces::new(vec![head]), Pieces::new(vec![own]))).await?;
    let mut objects = vec![&head];
    let mut delta_shards = delta_shards;
    if own.object().size_bytes > 0 {
        delta_shards.push(Shard {
            object: own.object(),
            back_bytes: 0,
        });
        objects.push(&own);
    }
    for pieces in &objects {
        store.put_pieces(policy, pieces).await?;
    }
    let place = publisher.place(None).await?;
    let mut manifest = Manifest {
        policy: policy.into(),
        version: place.serial,
        root: header.result,
        parent: Some(Parent {
            version: parent,
            root: known.root,
        }),
        line,
        branch: stand.map_or(0, |(_, branch)| branch),
        image: None,
        delta: Some(head.object()),
        tensor_bytes: joined.tensor_bytes,
        run: None,
        fence: 0,
        created_at: OffsetDateTime::now_utc(),
        quantised: vec![],
        delta_shards,
    };
    publisher.put_manifest(&mut manifest, place, None).await?;
    store.make_good(policy, &objects).await?;
    // a collection may have taken a share that had been there before; only who made it has its bytes
    for (shard, own) in manifest.delta_shards.iter().take(of).enumerate() {
        if !store.is_there(policy, &own.object).await? {
            return Err(Error::NoShare {
                name,
                shard: shard + 1,
                of,
            });
        }
    }
    let mut timings = Timings {
        encode: 0.0,
        upload: started.elapsed().as_secs_f64(),
        commit: 0.0,
    };
    let started = Instant::now();
    commit(publisher, &manifest, stand.is_none()).await?;
    timings.commit = started.elapsed().as_secs_f64();
    for shard in 0..of {
        if let Err(error) = store.delete_private(&report_key(policy, &name, shard, of)).await {
            tracing::warn!(%error, name, shard, "could not remove what a share reported");
        }
    }
    Ok((manifest, timings))
}

/// Where a report waits for whoever publishes.
fn report_key(policy: &str, name: &str, shard: usize, of: usize) -> String {
    format!("shares/{policy}/{name}/{}-of-{of}", shard + 1)
}
