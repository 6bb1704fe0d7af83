//! Publishes assignments to followers: one signed document per epoch in the policy store, then an
//! announcement.
//!
//! The rows in the database are authoritative. Publishing can be repeated: a document is written
//! only if it is absent, so the next leader publishes what a crashed one left out.

use super::ReleaseService;
use anyhow::Context;
use artifact::assignment::{Arm, Assignment, Target};
use artifact::digest::Digest;
use artifact::sign::TrustedKeys;
use ingest::log::Announcement;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use store::{PutOutcome, Timestamp};
use time::OffsetDateTime;

impl ReleaseService {
    /// Publishes every missing document, oldest first, so that followers never see a gap. Returns
    /// the newest epoch; 0: nothing was assigned yet.
    pub async fn publish_missing(&self) -> anyhow::Result<i64> {
        let inner = &self.0;
        let newest = sqlx::query_scalar!(
            r#"select coalesce(max(epoch), 0) as "epoch!" from assignment where policy = $1"#,
            inner.policy
        )
        .fetch_one(&inner.pool)
        .await
        .context("read newest epoch")?;
        if inner.published.load(Ordering::Relaxed) >= newest {
            return Ok(newest);
        }
        // documents are written in order, so the search ends at the first one that exists
        let mut published = newest;
        while published > 0 && self.published_from(published).await?.is_none() {
            published -= 1;
        }
        for epoch in published + 1..=newest {
            self.publish(epoch)
                .await
                .with_context(|| format!("publish assignment {epoch}"))?;
        }
        inner.published.fetch_max(newest, Ordering::Relaxed);
        Ok(newest)
    }

    /// The newest document at or above `epoch`.
    async fn published_from(&self, epoch: i64) -> anyhow::Result<Option<Assignment>> {
        let inner = &self.0;
        inner
            .store
            .latest_assignment(&inner.policy, epoch - 1, &self.trusted().await?)
            .await
            .with_context(|| format!("look for assignment {epoch}"))
    }

    /// Writes the signed timestamp that names the newest epoch, with which followers check the
    /// store.
    pub(super) async fn publish_timestamp(&self) -> anyhow::Result<()> {
        let inner = &self.0;
        anyhow::ensure!(
            self.trusted().await?.contains(inner.key.key_id()),
            "the key `release` is revoked: move release.key and release.pub away, and a new key is made"
        );
        let epoch = self.publish_missing().await?;
        let keys = TrustedKeys::load(&inner.keys_dir).context("load the trusted keys")?;
        let revoked = inner.store.revocations(&inner.policy, &keys).await;
        let timestamp = Timestamp {
            policy: inner.policy.clone(),
            epoch,
            revoked: revoked.context("look for revoked keys")?.into_keys().collect(),
            created_at: OffsetDateTime::now_utc(),
        };
        let put = inner.store.put_timestamp(&timestamp, &inner.key).await;
        put.context("write the store's timestamp")
    }

    /// Whether the newest document has other arms than the configuration.
    pub(super) async fn arms_changed(&self) -> anyhow::Result<bool> {
        let newest = self.publish_missing().await?;
        Ok(match self.published_from(newest).await? {
            Some(assignment) => assignment.arms != self.arms(&assignment.aliases),
            None => false,
        })
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
        if let PutOutcome::Exists(_) = inner.store.put_assignment(&assignment, &inner.key).await? {
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
