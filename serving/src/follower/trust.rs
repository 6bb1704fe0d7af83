//! Decides which assignment a follower accepts. It must be
//! - signed by a trusted release key that is not revoked,
//! - not older than the last accepted assignment, and not in contradiction to it,
//! - from a store whose timestamp shows that nothing newer exists. Without a timestamp only an
//!   assignment that was accepted here before is applied again.
//!
//! The object store itself is not trusted. In TUF's terms, this refuses *rollback* (an older epoch,
//! a second document for an epoch, another content hash for a version), *freeze* (the timestamp is
//! old or withheld), *mix-and-match* (the timestamp names a later epoch or a revocation that the
//! store does not show) and *fast-forward* (an epoch so high that it blocks all later ones). After
//! a refusal the replica keeps serving its current versions.

mod state;

use anyhow::Context;
use artifact::assignment::{self, Assignment, EPOCH_JUMP_MAX};
use artifact::sign::{self, TrustedKeys};
use state::TrustState;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use store::{Signed, Store, Timestamp};
use time::OffsetDateTime;

/// How often revocations and the timestamp are read when there is no new assignment.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
/// An older timestamp is refused. The release loop renews it every ten seconds.
const TIMESTAMP_AGE_MAX: time::Duration = time::Duration::seconds(60);
/// How far clocks may differ.
const CLOCK_SKEW_MAX: time::Duration = time::Duration::seconds(30);

/// A follower's trusted keys and trust state.
#[derive(Debug)]
pub struct Trust {
    store: Store,
    policy: String,
    keys_dir: PathBuf,
    state: TrustState,
    /// When revocations and the timestamp were last read.
    checked: Option<Instant>,
    /// The newest epoch according to that timestamp; 0: none.
    announced: i64,
    /// How old the timestamp of the first assignment that is ever accepted may be.
    first_age_max: time::Duration,
}

impl Trust {
    /// Reads the trust state of earlier runs. An unreadable state is an error, because it protects
    /// against old assignments.
    pub fn new(store: Store, policy: &str, keys_dir: &Path, state_dir: &Path) -> anyhow::Result<Self> {
        Ok(Trust {
            state: TrustState::open(state_dir, policy)?,
            store,
            policy: policy.into(),
            keys_dir: keys_dir.into(),
            checked: None,
            announced: 0,
            first_age_max: TIMESTAMP_AGE_MAX,
        })
    }

    /// The first assignment that is ever accepted may have an older timestamp, if that is longer.
    pub fn with_first_age_max(mut self, age_max: Duration) -> Self {
        let age_max = time::Duration::try_from(age_max).unwrap_or(TIMESTAMP_AGE_MAX);
        self.first_age_max = age_max.max(TIMESTAMP_AGE_MAX);
        self
    }

    /// The newest assignment, if it is newer than `in_force`, and the keys that may sign its
    /// versions. It is recorded in the trust state before this returns.
    pub async fn newest(&mut self, in_force: i64) -> anyhow::Result<Option<(Assignment, TrustedKeys)>> {
        let mut keys = self.keys().await?;
        let known = self.state.epoch(&keys);
        // after a restart the recorded epoch itself may be applied again, an earlier one never
        let after = match in_force > 0 && in_force <= known {
            true => in_force,
            false => (known - 1).max(0),
        };
        // The timestamp leads past epochs that revoked keys signed, and past gaps.
        let start = after.max(self.announced - 1);
        let newest = self.store.newest_assignment(&self.policy, start, &keys).await;
        let Some(assignment) = newest.context("look for an assignment")? else {
            anyhow::ensure!(
                in_force > 0 || known == 0,
                "the store has no assignment at or above epoch {known}, the highest one verified here before; \
                 an older one is refused"
            );
            anyhow::ensure!(
                self.announced <= in_force,
                "the store shows no newer assignment, and its timestamp says that {} exists",
                self.announced
            );
            return Ok(None);
        };
        let (epoch, policy) = (assignment.document.epoch, &assignment.document.policy);
        anyhow::ensure!(
            epoch > after && *policy == self.policy,
            "asked for an assignment of {} after epoch {after}, the store answered with {epoch} of {policy}",
            self.policy
        );
        assignment.document.check().context("check the assignment")?;
        keys = self.check_revocations().await.context("look for revoked keys")?;
        anyhow::ensure!(
            keys.may_sign(&assignment.signer, assignment::KIND),
            "assignment {epoch} is signed by key {}, which is revoked",
            assignment.signer
        );
        self.check_timestamp(&assignment, &keys)
            .await
            .with_context(|| format!("check the store's timestamp; assignment {epoch} is refused"))?;
        self.state
            .record_assignment(&assignment, &keys)
            .context("record the assignment")?;
        Ok(Some((assignment.document, keys)))
    }

    /// The trusted keys. Reads new revocations every [`CHECK_INTERVAL`].
    async fn keys(&mut self) -> anyhow::Result<TrustedKeys> {
        if self.checked.is_some_and(|checked| checked.elapsed() < CHECK_INTERVAL) {
            return self.keys_of_folder();
        }
        self.check_revocations().await
    }

    /// The keys of the folder without those known to be revoked.
    fn keys_of_folder(&self) -> anyhow::Result<TrustedKeys> {
        let mut keys = TrustedKeys::load(&self.keys_dir).context("load the trusted keys")?;
        keys.revoke_by(self.state.revocations());
        Ok(keys)
    }

    /// Records the revocations in the store, and reads what its timestamp says is newest.
    async fn check_revocations(&mut self) -> anyhow::Result<TrustedKeys> {
        let before = self.keys_of_folder()?;
        let revocations = self.store.revocations(&self.policy, &before).await?;
        self.state
            .record_revocations(revocations)
            .context("record revocations")?;
        let keys = self.keys_of_folder()?;
        for key in keys.ids().filter(|key| before.contains(key) && !keys.contains(key)) {
            tracing::warn!(
                policy = self.policy,
                key,
                "key revoked; its signatures are refused from now on"
            );
        }
        self.announced = 0;
        if let Ok(Some(Signed { document, .. })) = self.store.get_timestamp(&self.policy, &keys).await {
            self.announced = document.epoch;
            let age = OffsetDateTime::now_utc() - document.created_at;
            metrics::gauge!("springtide_store_statement_age_seconds").set(age.as_seconds_f64());
        }
        self.checked = Some(Instant::now());
        Ok(keys)
    }

    /// Refuses an assignment unless the store's timestamp shows that it is the newest. Without a
    /// timestamp only an assignment that was verified here before is accepted, because a new
    /// follower cannot know how old the store is.
    async fn check_timestamp(&mut self, assignment: &Signed<Assignment>, keys: &TrustedKeys) -> anyhow::Result<()> {
        let timestamp = match self.store.get_timestamp(&self.policy, keys).await {
            // the next release leader signs a new one
            Err(store::Error::Signature {
                source: sign::Error::Revoked(key),
                ..
            }) => anyhow::bail!("it is signed by key {key}, which is revoked"),
            read => read?,
        };
        let seen_before = self.state.timestamp_at();
        let Some(timestamp) = timestamp.map(|signed| signed.document) else {
            anyhow::ensure!(
                self.state.has_verified(assignment),
                match seen_before {
                    Some(_) => "the store withholds its timestamp, which it had before",
                    None => "the store shows no timestamp, so it may be old; is `springtide control` running?",
                }
            );
            return Ok(());
        };
        let Timestamp { epoch, created_at, .. } = timestamp;
        // A key that is not in the folder is not trusted anyway.
        let mut hidden = timestamp.revoked.iter();
        let hidden = hidden.find(|key| keys.knows(key) && !keys.is_revoked(key));
        if let Some(key) = hidden {
            anyhow::bail!(
                "the timestamp says that key {key} is revoked, and the store shows no revocation that counts here; \
                 is the root key's .pub in the keys folder?"
            );
        }
        let now = OffsetDateTime::now_utc();
        anyhow::ensure!(
            seen_before.is_none_or(|before| created_at >= before),
            "the timestamp is of {created_at}, and a later one was seen before"
        );
        anyhow::ensure!(
            created_at <= now + CLOCK_SKEW_MAX,
            "the timestamp of {created_at} is in the future: set the clocks"
        );
        let shown = assignment.document.epoch;
        anyhow::ensure!(
            epoch <= shown,
            "the newest assignment in the store is {shown}, and the timestamp says that {epoch} exists"
        );
        anyhow::ensure!(
            shown - epoch <= EPOCH_JUMP_MAX,
            "the epoch jumps too far ahead of {epoch}, the newest according to the timestamp"
        );
        let age_max = match seen_before {
            None => self.first_age_max,
            Some(_) => TIMESTAMP_AGE_MAX,
        };
        // an assignment accepted earlier may be applied again after a restart
        anyhow::ensure!(
            now - created_at <= age_max || self.state.has_verified(assignment),
            "the timestamp is {} s old, so newer assignments may be missing; is `springtide control` running?",
            (now - created_at).whole_seconds()
        );
        self.state.record_timestamp(created_at)
    }
}

#[cfg(test)]
mod tests;
