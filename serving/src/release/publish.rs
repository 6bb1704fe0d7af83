//! Publishes assignments to followers: one signed document per epoch in the policy store, then an
//! announcement.
//!
//! The rows in the database are authoritative. Publishing can be repeated: a document is written
//! only if it is absent, so the next leader publishes what a crashed one left out.

use super::ReleaseService;
use anyhow::Context;
use artifact::assignment::{self, Arm, Assignment, EPOCH_JUMP_MAX, Target};
use artifact::digest::Digest;
use artifact::sign::TrustedKeys;
use ingest::log::Announcement;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use store::Timestamp;
use time::OffsetDateTime;

/// Later epochs in the store than this many behind the newest one are ignored. Far below the jump
/// that followers refuse, so that several thefts in a row do not block releases.
const TAKEN_JUMP_MAX: i64 = EPOCH_JUMP_MAX / 100;

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
            let epochs = store.assignment_epochs(policy, first).await;
            let epochs = epochs.context("list assignments")?;
            if let Some(last) = epochs.into_iter().rfind(|&epoch| epoch <= newest) {
                return Ok(last);
            }
        }
        Ok(0)
    }

    /// The highest epoch that is taken, if releases cannot go on from the newest one in the tables:
    /// its document is signed by a key that is no longer trusted or says something else, it has
    /// other arms than the configuration, or the store has later documents (of a thief, or from
    /// before a database restore).
    ///
    /// A thief cannot use up all epochs: those that are too far away are ignored here, and followers
    /// refuse such a jump.
    pub(super) async fn taken_epoch(&self) -> anyhow::Result<Option<i64>> {
        let inner = &self.0;
        let newest = self.newest_epoch().await?;
        if newest == 0 {
            return Ok(None);
        }
        let epochs = inner.store.assignment_epochs(&inner.policy, newest).await;
        let mut epochs = epochs.context("list assignments")?;
        epochs.retain(|&epoch| epoch <= newest + TAKEN_JUMP_MAX);
        let last = epochs.last().copied().unwrap_or(newest);
        let sound = match epochs.first() {
            Some(first) if *first == newest => self.is_published(newest).await?,
            // not published yet
            _ => true,
        };
        Ok((last > newest || !sound).then_some(last))
    }

    /// Whether the store's document of `epoch` is trusted and says what the tables and the
    /// configured arms say.
    async fn is_published(&self, epoch: i64) -> anyhow::Result<bool> {
        let inner = &self.0;
        let trusted = self.trusted().await?;
        match inner.store.get_assignment(&inner.policy, epoch, &trusted).await {
            Ok(found) => {
                let expected = self.document(epoch).await?;
                Ok(found.aliases == expected.aliases && found.arms == expected.arms)
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

    /// The configured arms whose aliases exist.
    fn arms(&self, aliases: &BTreeMap<String, Target>) -> Vec<Arm> {
        self.0
            .options
            .arms
            .iter()
            .filter(|arm| aliases.contains_key(&arm.alias))
            .map(|arm| Arm {
                alias: arm.alias.clone(),
                weight: arm.weight,
                explore: arm.explore,
            })
            .collect()
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

    /// The assignment of `epoch`: all aliases as of then, and the arms.
    async fn document(&self, epoch: i64) -> anyhow::Result<Assignment> {
        let inner = &self.0;
        let rows = sqlx::query!(
            r#"select distinct on (a.alias) a.alias, a.version, a.withdrawn, v.root
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
        for row in rows.into_iter().filter(|row| !row.withdrawn) {
            let root = Digest::from_slice(&row.root)
                .with_context(|| format!("version {} has a content hash of {} bytes", row.version, row.root.len()))?;
            let version = row.version;
            aliases.insert(row.alias, Target { version, root });
        }
        Ok(Assignment {
            policy: inner.policy.clone(),
            epoch,
            arms: self.arms(&aliases),
            aliases,
            created_at,
        })
    }
}
