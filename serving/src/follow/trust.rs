//! Which assignment a follower believes: signed by a key that is trusted and not revoked, not older than what was believed
//! before, not contradicting it, and out of a store that shows what is newest. The store itself is trusted with nothing.
//!
//! Refused are, in the words of TUF: *rollback* (an older epoch, another document for the same one, another root for a version),
//! *freeze* (the store's statement is old, or kept back), *mix-and-match* (the statement names a later epoch or a revocation
//! that the store does not show), and *fast-forward* (an epoch after which none would count). What serves goes on serving; it
//! is only what is new that is not believed.

use super::memory::{LEAP_MAX, Memory};
use anyhow::Context;
use policy::assignment::Assignment;
use policy::sign::{self, TrustedKeys};
use policy::store::{self, Signed, Statement, Store};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use time::OffsetDateTime;

/// How often revocations and the statement are looked at while nothing else is new.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// An older statement is no news: the release loop makes one every ten seconds.
const STATEMENT_AGE_MAX: time::Duration = time::Duration::seconds(60);
/// How far clocks may differ.
const SKEW_MAX: time::Duration = time::Duration::seconds(30);

/// A follower's trust, and what it rests on.
#[derive(Debug)]
pub struct Trust {
    store: Store,
    policy: String,
    keys_dir: PathBuf,
    memory: Memory,
    looked: Option<Instant>,
}

impl Trust {
    /// Reads the follower's memory; one that cannot be read is an error, because it guards against old assignments.
    pub fn new(store: Store, policy: &str, keys_dir: &Path, state_dir: &Path) -> anyhow::Result<Self> {
        Ok(Trust {
            memory: Memory::open(state_dir, policy)?,
            store,
            policy: policy.into(),
            keys_dir: keys_dir.into(),
            looked: None,
        })
    }

    /// The newest assignment, if it is not in force yet, and the keys that its versions must be signed by. It is remembered
    /// when this returns.
    pub async fn newest(&mut self, in_force: i64) -> anyhow::Result<Option<(Assignment, TrustedKeys)>> {
        let mut keys = self.keys().await?;
        let known = self.memory.epoch(&keys);
        // after a restart the remembered epoch itself is still good; an earlier one never is
        let after = match in_force > 0 && in_force <= known {
            true => in_force,
            false => (known - 1).max(0),
        };
        let newest = self.store.newest_assignment(&self.policy, after, &keys).await;
        let Some(assignment) = newest.context("look for an assignment")? else {
            anyhow::ensure!(
                in_force > 0 || known == 0,
                "the store has no assignment at or above epoch {known}, the highest one verified here before; \
                 an older one is refused"
            );
            return Ok(None);
        };
        let (epoch, of) = (assignment.document.epoch, &assignment.document.policy);
        anyhow::ensure!(
            epoch > after && *of == self.policy,
            "the store answered with assignment {epoch} of {of}, after {after} of {} was asked for",
            self.policy
        );
        assignment.document.check().context("check the assignment")?;
        keys = self.see_news(keys).await.context("look for revoked keys")?;
        anyhow::ensure!(
            keys.contains(&assignment.signer),
            "assignment {epoch} is signed by key {}, which is revoked",
            assignment.signer
        );
        self.is_news(&assignment, &keys)
            .await
            .context("look at the store's statement")?;
        self.memory.verified(&assignment, &keys).context("remember the epoch")?;
        Ok(Some((assignment.document, keys)))
    }

    /// The keys of the folder without those that are revoked, as far as is known without much looking.
    async fn keys(&mut self) -> anyhow::Result<TrustedKeys> {
        let keys = self.folder()?;
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return Ok(keys);
        }
        self.see_news(keys).await
    }

    fn folder(&self) -> anyhow::Result<TrustedKeys> {
        let mut keys = TrustedKeys::load(&self.keys_dir).context("load the trusted keys")?;
        let revoked: Vec<String> = self.memory.revoked(&keys).cloned().collect();
        revoked.iter().for_each(|key| keys.revoke(key));
        Ok(keys)
    }

    /// Learns of revocations: those that the store shows, and those that its statement names.
    async fn see_news(&mut self, keys: TrustedKeys) -> anyhow::Result<TrustedKeys> {
        let mut revoked = self.store.revocations(&self.policy, &keys).await?;
        if let Ok(Some(statement)) = self.store.statement(&self.policy, &keys).await {
            let Signed { document, signer, .. } = statement;
            revoked.extend(document.revoked.into_iter().map(|key| (key, signer.clone())));
            let age = OffsetDateTime::now_utc() - document.created_at;
            metrics::gauge!("springtide_store_statement_age_seconds").set(age.as_seconds_f64());
        }
        for key in revoked.keys().filter(|key| keys.contains(key)) {
            tracing::warn!(
                policy = self.policy,
                key,
                "a key is revoked: nothing that it signed is loaded any longer"
            );
        }
        self.memory.revoke(revoked).context("remember revocations")?;
        self.looked = Some(Instant::now());
        self.folder()
    }

    /// Refuses an assignment out of a store that does not show what is newest. A store that never had a statement, to a
    /// follower that never saw one, need not have one.
    async fn is_news(&mut self, assignment: &Signed<Assignment>, keys: &TrustedKeys) -> anyhow::Result<()> {
        let statement = self.store.statement(&self.policy, keys).await;
        let statement = match statement {
            // of the key that led the releases until now: the next leader signs another
            Err(store::Error::Signature {
                source: sign::Error::Revoked(key),
                ..
            }) => anyhow::bail!("it is signed by key {key}, which is revoked"),
            read => read?,
        };
        let Some(Statement { epoch, created_at, .. }) = statement.map(|signed| signed.document) else {
            let before = self.memory.stated_at();
            anyhow::ensure!(
                before.is_none() || self.memory.knows(assignment),
                "the store keeps back its statement, which was there before: {assignment}",
                assignment = not_taken(assignment)
            );
            return Ok(());
        };
        let (now, before) = (OffsetDateTime::now_utc(), self.memory.stated_at());
        anyhow::ensure!(
            before.is_none_or(|before| created_at >= before),
            "the store shows a statement of {created_at}, and a later one was seen before: {}",
            not_taken(assignment)
        );
        anyhow::ensure!(
            created_at <= now + SKEW_MAX,
            "the store's statement is of {created_at}, which is not yet: set the clocks"
        );
        anyhow::ensure!(
            epoch <= assignment.document.epoch,
            "the store shows assignment {}, and its statement says that {epoch} is the newest",
            assignment.document.epoch
        );
        anyhow::ensure!(
            assignment.document.epoch - epoch <= LEAP_MAX,
            "assignment {} leaps far beyond {epoch}, which the store's statement says is the newest",
            assignment.document.epoch
        );
        // what was believed while it was news may be taken up again after a restart
        anyhow::ensure!(
            now - created_at <= STATEMENT_AGE_MAX || self.memory.knows(assignment),
            "the store's statement is {} s old, so what it shows may be old as well: {}; is `springtide control` running?",
            (now - created_at).whole_seconds(),
            not_taken(assignment)
        );
        self.memory.stated(created_at)
    }
}

fn not_taken(assignment: &Signed<Assignment>) -> String {
    format!("assignment {} is not taken", assignment.document.epoch)
}

#[cfg(test)]
mod tests;
