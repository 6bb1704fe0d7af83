//! Publishes assignments to followers: one signed document per epoch in the policy store, then an
//! announcement.
//!
//! The rows in the database are authoritative. Publishing can be repeated: a document is written
//! only if it is absent, so the next leader publishes what a crashed one left out.

use super::decide::arms::{Experiment, with_canary};
use super::{ArmOptions, ReleaseService, tables};
use anyhow::Context;
use artifact::assignment::{self, Arm, Assignment, EPOCH_JUMP_MAX, Target};
use artifact::digest::Digest;
use artifact::sign::TrustedKeys;
use event_log::Announcement;
use futures::{StreamExt as _, stream};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use store::Timestamp;
use time::OffsetDateTime;

/// Later epochs in the store than this many behind the newest one are ignored. Far below the jump
/// that followers refuse, so that several thefts in a row do not block releases.
const TAKEN_JUMP_MAX: i64 = EPOCH_JUMP_MAX / 100;
/// Epochs that are skipped within an hour. A replica that is down for four days still follows.
const SKIPPED_PER_HOUR_MAX: i64 = EPOCH_JUMP_MAX / 100;
/// Documents that are read to find the newest one that verifies.
const VERIFIED_MAX: usize = 1_000;
const READ_AT_ONCE: usize = 32;

impl ReleaseService {
    /// Publishes every missing document, oldest first, so that followers never see a gap. Returns
    /// the newest epoch; 0: nothing was assigned yet.
    pub async fn publish_missing(&self) -> anyhow::Result<i64> {
        let inner = &self.0;
        let newest = self.newest_epoch().await?;
        if newest == 0 {
            return Ok(0);
        }
        let published = match inner.published.load(Ordering::Relaxed) {
            0 => self.last_published(newest).await?,
            known => known,
        };
        if published >= newest {
            inner.published.fetch_max(newest, Ordering::Relaxed);
            return Ok(newest);
        }
        let missing = sqlx::query_scalar!(
            "select distinct epoch from assignment where policy = $1 and epoch > $2 order by epoch",
            inner.policy,
            published
        )
        .fetch_all(&inner.pool)
        .await
        .context("read epochs")?;
        for epoch in missing {
            self.publish(epoch)
                .await
                .with_context(|| format!("publish assignment {epoch}"))?;
            inner.published.fetch_max(epoch, Ordering::Relaxed);
        }
        Ok(newest)
    }

    async fn newest_epoch(&self) -> anyhow::Result<i64> {
        sqlx::query_scalar!(
            r#"select coalesce(max(epoch), 0) as "epoch!" from assignment where policy = $1"#,
            self.0.policy
        )
        .fetch_one(&self.0.pool)
        .await
        .context("read newest epoch")
    }

    /// The highest epoch up to `newest` that has a document in the store, whoever signed it.
    /// Documents are written in order, so none before it is missing.
    async fn last_published(&self, newest: i64) -> anyhow::Result<i64> {
        let (store, policy) = (&self.0.store, &self.0.policy);
        for first in [newest, 1] {
            let last = store.last_assignment_epoch(policy, first..=newest).await;
            if let Some(last) = last.context("list assignments")? {
                return Ok(last);
            }
        }
        Ok(0)
    }

    /// The epoch below the one to go on at, if releases cannot go on from the newest one in the
    /// tables:
    /// - its document is signed by a key that is no longer trusted or says something else;
    /// - the store has later documents that verify, as after a database restore;
    /// - somebody else's document takes the next place.
    ///
    /// Other documents are skipped one by one, and only where they are in the way. So whoever writes
    /// to the store, but has no key, moves the epochs by one per document, and by at most
    /// [`SKIPPED_PER_HOUR_MAX`] in an hour: a replica refuses too large a jump, also one that was
    /// down meanwhile.
    pub(super) async fn taken_epoch(&self) -> anyhow::Result<Option<i64>> {
        let inner = &self.0;
        let newest = self.newest_epoch().await?;
        if newest == 0 {
            return Ok(None);
        }
        let window = newest..=newest + TAKEN_JUMP_MAX;
        let taken = inner.store.assignment_epochs(&inner.policy, window).await;
        let taken = taken.context("list assignments")?;
        // if the newest one is not there, it is not published yet
        let sound = !taken.contains(&newest) || self.is_published(newest).await?;
        let last = self.last_verified(&taken).await?.unwrap_or(newest).max(newest);
        if sound && last == newest && !taken.contains(&(newest + 1)) {
            return Ok(None);
        }
        let is_free = |epoch: &i64| !taken.contains(epoch);
        let next = (last + 1..).find(is_free).context("there is no free epoch")?;
        self.check_skipped(next).await?;
        Ok(Some(next - 1))
    }

    /// The highest of these epochs whose document verifies. It looks at so many that junk above the
    /// newest one does not hide it, and at no more than [`VERIFIED_MAX`].
    async fn last_verified(&self, epochs: &BTreeSet<i64>) -> anyhow::Result<Option<i64>> {
        let (store, policy) = (&self.0.store, &self.0.policy);
        let trusted = self.trusted().await?;
        let trusted = &trusted;
        let highest: Vec<i64> = epochs.iter().rev().take(VERIFIED_MAX).copied().collect();
        let read = |epoch| async move { (epoch, store.get_assignment(policy, epoch, trusted).await) };
        let mut read = stream::iter(highest).map(read).buffered(READ_AT_ONCE);
        while let Some((epoch, assignment)) = read.next().await {
            match assignment {
                Ok(_) => return Ok(Some(epoch)),
                Err(error @ store::Error::Backend { .. }) => return Err(error).context("read assignments"),
                Err(_) => {}
            }
        }
        Ok(None)
    }

    /// An error if going on at `next` would skip too many epochs within an hour.
    async fn check_skipped(&self, next: i64) -> anyhow::Result<()> {
        let skipped = sqlx::query_scalar!(
            r#"
            with earlier (newest) as (
                select coalesce(max(epoch), 0) from assignment
                where policy = $1 and created_at < now() - interval '1 hour'
            )
            select $2::bigint - 1 - newest
                   - (select count(distinct epoch) from assignment where policy = $1 and epoch > newest) as "skipped!"
            from earlier
            "#,
            self.0.policy,
            next
        )
        .fetch_one(&self.0.pool)
        .await
        .context("count skipped epochs")?;
        anyhow::ensure!(
            skipped <= SKIPPED_PER_HOUR_MAX,
            "the next free epoch in the store is {next}, which would skip {skipped} epochs within an hour: somebody else \
             writes assignments to the store. Take that access away; releases go on when fewer are skipped"
        );
        Ok(())
    }

    /// Whether the store's document of `epoch` is trusted and says what the tables say.
    async fn is_published(&self, epoch: i64) -> anyhow::Result<bool> {
        let inner = &self.0;
        let trusted = self.trusted().await?;
        match inner.store.get_assignment(&inner.policy, epoch, &trusted).await {
            Ok(found) => {
                let expected = self.document(epoch).await?;
                let arms = (&found.arms, &found.cluster_arms, found.shadow, &found.salt)
                    == (&expected.arms, &expected.cluster_arms, expected.shadow, &expected.salt);
                // before there was an experiment, the arms were another configuration's
                let known = self.experiment(epoch).await?.is_some();
                Ok(found.aliases == expected.aliases && (arms || !known))
            }
            Err(error @ store::Error::Backend { .. }) => Err(error).context("read the newest assignment"),
            Err(error) => {
                tracing::warn!(policy = inner.policy, epoch, %error, "releases cannot go on from the newest assignment");
                Ok(false)
            }
        }
    }

    /// Returns an error if this process's key may not sign releases.
    pub(super) async fn check_key(&self) -> anyhow::Result<()> {
        let trusted = self.trusted().await?;
        anyhow::ensure!(
            trusted.may_sign(self.0.key.key_id(), assignment::KIND),
            match trusted.is_revoked(self.0.key.key_id()) {
                true => "the key `release` is revoked: move release.key and release.pub away, and a new key is made",
                false =>
                    "the key `release` may not sign releases: release.pub is not in the keys folder, or has another role",
            }
        );
        Ok(())
    }

    /// Writes the signed timestamp that names the newest epoch, with which followers check the
    /// store.
    pub(super) async fn publish_timestamp(&self) -> anyhow::Result<()> {
        let inner = &self.0;
        self.check_key().await?;
        let epoch = self.publish_missing().await?;
        let keys = TrustedKeys::load(&inner.keys_dir).context("load the trusted keys")?;
        let revocations = inner.store.revocations(&inner.policy, &keys).await;
        let revocations = revocations.context("look for revoked keys")?;
        let mut trusted = keys.clone();
        trusted.revoke_by(&revocations);
        // A key that is revoked on this machine alone is not named: followers cannot know it.
        let revoked = |key: &String| trusted.is_revoked(key) && !keys.is_revoked(key);
        let timestamp = Timestamp {
            policy: inner.policy.clone(),
            epoch,
            revoked: revocations.into_keys().filter(revoked).collect(),
            created_at: OffsetDateTime::now_utc(),
        };
        let put = inner.store.put_timestamp(&timestamp, &inner.key).await;
        put.context("write the store's timestamp")
    }

    /// The experiment that divides users at `epoch`. `None`: there was none yet.
    async fn experiment(&self, epoch: i64) -> anyhow::Result<Option<Experiment>> {
        let mut connection = self.0.pool.acquire().await.context("connect")?;
        let experiment = tables::experiment(&mut connection, &self.0.policy, epoch).await;
        experiment.context("read the experiment")
    }

    async fn publish(&self, epoch: i64) -> anyhow::Result<()> {
        let inner = &self.0;
        let assignment = self.document(epoch).await?;
        if !inner.store.put_assignment(&assignment, &inner.key).await? {
            // Another leader wrote it, or somebody whose word does not count. In that case the next
            // leader goes on above it.
            anyhow::ensure!(
                self.is_published(epoch).await?,
                "the store has another document in its place"
            );
            return Ok(());
        }
        tracing::info!(policy = inner.policy, epoch, "assignment published");
        let Some(log) = &inner.log else { return Ok(()) };
        let announcement = Announcement {
            policy: inner.policy.clone(),
            object_key: format!("policy/{}/assignment/{epoch:010}.json", inner.policy),
            version: 0,
            epoch,
        };
        // only a hint: followers also poll the store
        if let Err(error) = log.send_announcement(&announcement).await {
            tracing::warn!(epoch, %error, "assignment not announced");
        }
        Ok(())
    }

    /// The assignment of `epoch`: all aliases as of then, and the arms whose aliases exist.
    async fn document(&self, epoch: i64) -> anyhow::Result<Assignment> {
        let inner = &self.0;
        let rows = sqlx::query!(
            r#"select distinct on (a.alias) a.alias, a.version, a.withdrawn, a.share, a.clusters, a.shadow, v.root
               from assignment a
               join version v on v.policy = a.policy and v.serial = a.version
               where a.policy = $1 and a.epoch <= $2
               order by a.alias, a.epoch desc"#,
            inner.policy,
            epoch
        )
        .fetch_all(&inner.pool)
        .await
        .context("read aliases")?;
        let created_at = sqlx::query_scalar!(
            "select created_at from assignment where policy = $1 and epoch = $2 limit 1",
            inner.policy,
            epoch
        )
        .fetch_one(&inner.pool)
        .await
        .context("read epoch")?;
        let mut aliases = BTreeMap::new();
        let (mut canary, mut shadow) = (None, 0.0);
        for row in rows.into_iter().filter(|row| !row.withdrawn) {
            let root = Digest::from_slice(&row.root)
                .with_context(|| format!("version {} has a content hash of {} bytes", row.version, row.root.len()))?;
            let version = row.version;
            shadow = row.shadow.unwrap_or(shadow);
            canary = canary.or(row.share.map(|share| (share, row.clusters)));
            aliases.insert(row.alias, Target { version, root });
        }
        let (arms, salt) = match self.experiment(epoch).await? {
            Some(experiment) => (experiment.arms, experiment.salt),
            None => (inner.options.arms.clone(), String::new()),
        };
        let arms: Vec<ArmOptions> = arms
            .into_iter()
            .filter(|arm| aliases.contains_key(&arm.alias))
            .collect();
        let with_canary = |share| signed(with_canary(arms.iter().cloned(), share));
        let (cluster_arms, arms) = match canary {
            None => (BTreeMap::new(), signed(arms)),
            Some((share, None)) => (BTreeMap::new(), with_canary(share)),
            Some((share, Some(clusters))) => {
                let of_clusters = clusters.into_iter().map(|cluster| (cluster, with_canary(share)));
                (of_clusters.collect(), signed(arms.clone()))
            }
        };
        Ok(Assignment {
            policy: inner.policy.clone(),
            epoch,
            arms,
            cluster_arms,
            shadow,
            salt,
            aliases,
            created_at,
        })
    }
}

fn signed(arms: Vec<ArmOptions>) -> Vec<Arm> {
    let arm = |arm: ArmOptions| Arm {
        alias: arm.alias,
        weight: arm.weight,
        explore: arm.explore,
        temperature_max: arm.temperature_max,
        probability_min: arm.probability_min,
    };
    arms.into_iter().map(arm).collect()
}
