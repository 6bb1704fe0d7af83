//! From rows to what followers read: one signed document per epoch in the policy store, and its announcement. Repeatable:
//! the rows are the truth, a document is put if absent, and whoever comes after a crash puts what is missing.

use super::Desk;
use anyhow::Context;
use ingest::log::Announcement;
use policy::assignment::{Arm, Assignment, Target};
use policy::digest::Digest;
use policy::sign::TrustedKeys;
use policy::store::{PutOutcome, Statement};
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use time::OffsetDateTime;

impl Desk {
    /// Puts every document that is missing, oldest first, so that no follower meets a gap. Returns the newest epoch, 0
    /// where nothing was ever assigned.
    pub async fn publish_missing(&self) -> anyhow::Result<i64> {
        let desk = &self.0;
        let newest = sqlx::query_scalar!(
            r#"select coalesce(max(epoch), 0) as "epoch!" from assignment where policy = $1"#,
            desk.policy
        )
        .fetch_one(&desk.pool)
        .await
        .context("read newest epoch")?;
        if desk.published.load(Ordering::Relaxed) >= newest {
            return Ok(newest);
        }
        // a document is only ever put after its predecessor, so the first one that is there ends the search
        let mut there = newest;
        while there > 0 && self.published_from(there).await?.is_none() {
            there -= 1;
        }
        for epoch in there + 1..=newest {
            self.publish(epoch)
                .await
                .with_context(|| format!("publish assignment {epoch}"))?;
        }
        desk.published.fetch_max(newest, Ordering::Relaxed);
        Ok(newest)
    }

    /// The newest document at or above `epoch`.
    async fn published_from(&self, epoch: i64) -> anyhow::Result<Option<Assignment>> {
        let desk = &self.0;
        desk.store
            .latest_assignment(&desk.policy, epoch - 1, &self.trusted().await?)
            .await
            .with_context(|| format!("look for assignment {epoch}"))
    }

    /// Says what is newest, for followers to hold what the store shows them against.
    pub(super) async fn state(&self) -> anyhow::Result<()> {
        let desk = &self.0;
        anyhow::ensure!(
            self.trusted().await?.contains(desk.key.key_id()),
            "the key `release` is revoked: put release.key and release.pub away, and a new one is made"
        );
        let epoch = self.publish_missing().await?;
        let keys = TrustedKeys::load(&desk.keys_dir).context("load the trusted keys")?;
        let revoked = desk.store.revocations(&desk.policy, &keys).await;
        let statement = Statement {
            policy: desk.policy.clone(),
            epoch,
            revoked: revoked.context("look for revoked keys")?.into_keys().collect(),
            created_at: OffsetDateTime::now_utc(),
        };
        let put = desk.store.put_statement(&statement, &desk.key).await;
        put.context("write the store's statement")
    }

    /// Whether the newest document has other arms than this process was told to have.
    pub(super) async fn arms_changed(&self) -> anyhow::Result<bool> {
        let newest = self.publish_missing().await?;
        Ok(match self.published_from(newest).await? {
            Some(assignment) => assignment.arms != self.arms(&assignment.aliases),
            None => false,
        })
    }

    /// The experiment, as far as its aliases exist.
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
        let desk = &self.0;
        let Some(assignment) = self.document(epoch).await? else {
            anyhow::bail!("epoch {epoch} has no rows");
        };
        if let PutOutcome::Exists(_) = desk.store.put_assignment(&assignment, &desk.key).await? {
            return Ok(());
        }
        tracing::info!(policy = desk.policy, epoch, "assignment published");
        let Some(log) = &desk.log else { return Ok(()) };
        let announcement = Announcement {
            policy: desk.policy.clone(),
            object_key: format!("policy/{}/assignment/{epoch:010}.json", desk.policy),
            version: 0,
            epoch,
        };
        // a hint: followers look at the store anyway
        if let Err(error) = log.send_announcement(&announcement).await {
            tracing::warn!(epoch, error = %error, "assignment not announced");
        }
        Ok(())
    }

    /// All aliases as of `epoch`, with the experiment's arms that exist by then.
    async fn document(&self, epoch: i64) -> anyhow::Result<Option<Assignment>> {
        let desk = &self.0;
        let rows = sqlx::query!(
            r#"select distinct on (a.alias) a.alias, a.version, a.withdrawn, v.root
               from assignment a
               join version v on v.policy = a.policy and v.serial = a.version
               where a.policy = $1 and a.epoch <= $2
               order by a.alias, a.epoch desc"#,
            desk.policy,
            epoch
        )
        .fetch_all(&desk.pool)
        .await
        .context("read aliases")?;
        let created_at = sqlx::query_scalar!(
            "select created_at from assignment where policy = $1 and epoch = $2 limit 1",
            desk.policy,
            epoch
        )
        .fetch_optional(&desk.pool)
        .await
        .context("read epoch")?;
        let Some(created_at) = created_at else { return Ok(None) };
        let mut aliases = BTreeMap::new();
        for row in rows.into_iter().filter(|row| !row.withdrawn) {
            let root = Digest::from_slice(&row.root)
                .with_context(|| format!("version {} has a root of {} bytes", row.version, row.root.len()))?;
            aliases.insert(
                row.alias,
                Target {
                    version: row.version,
                    root,
                },
            );
        }
        let arms = self.arms(&aliases);
        Ok(Some(Assignment {
            policy: desk.policy.clone(),
            epoch,
            aliases,
            arms,
            created_at,
        }))
    }
}
