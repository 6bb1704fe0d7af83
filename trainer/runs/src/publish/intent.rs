//! What a run is about to publish, noted in the database before its manifest is written, and what
//! becomes of it after a crash.
//!
//! The note has the digests of the manifest's exact bytes and of the run state. So a thief of the
//! trainer's key who writes to the store cannot make a run continue from other weights: a manifest
//! that only looks like the run's next step is an orphan.

use super::record::{self, Intent};
use super::run_state::{self, RunState};
use super::{Error, Prepared, Publisher, Timings};
use crate::claim::Claim;
use artifact::digest::Digest;
use artifact::manifest::Manifest;
use artifact::sign::TrustedKeys;

impl Publisher {
    /// Notes in the database which manifest is put next, so that no other one is adopted as this
    /// step.
    pub(super) async fn note_intent(&self, claim: &Claim, manifest: &Manifest, run_state: Digest) -> Result<(), Error> {
        let Some(run) = &manifest.run else { return Ok(()) };
        let intent = Intent {
            serial: manifest.version,
            manifest: store::manifest_digest(manifest)?,
            run_state,
        };
        let mut transaction = claim.begin(&self.pool).await?;
        record::insert_intent(&mut transaction, manifest, run, &intent).await?;
        transaction.commit().await?;
        Ok(())
    }

    /// After a restart: commits the step that an earlier executor of this run prepared, if its
    /// manifest exists and the line has not moved since. Returns the serial of the adopted version.
    ///
    /// Manifest and run state must be exactly those that the executor noted before it wrote them.
    pub async fn adopt(
        &self,
        claim: &Claim,
        step: i64,
        line: &str,
        branch: i32,
        head: i64,
    ) -> Result<Option<i64>, Error> {
        let intents = record::intents(&self.pool, &self.policy, claim.run, step).await?;
        if intents.is_empty() {
            return Ok(None);
        }
        let trusted = self.trusted().await?;
        for intent in intents {
            let Some(manifest) = self.probe(&intent, &trusted).await? else {
                continue;
            };
            let follows = manifest.line == line
                && manifest.branch == branch
                && manifest.parent.as_ref().is_some_and(|p| p.version == head);
            if !follows {
                continue;
            }
            let serial = intent.serial;
            let run_state_key = run_state::key(claim.run, step, serial);
            let record = match self.read_run_state(&run_state_key, Some(intent.run_state)).await {
                Ok(run_state) => run_state.record,
                Err(error) if error.is_lost() => {
                    tracing::warn!(%error, serial, "a prepared step has no usable run state: left as an orphan");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let prepared = Prepared {
                manifest,
                record,
                run_state_key,
                run_state_digest: intent.run_state,
                timings: Timings::default(),
            };
            match self.commit(claim, &prepared).await {
                Ok(()) => {
                    self.after_commit(&prepared).await;
                    return Ok(Some(serial));
                }
                Err(error @ (Error::AlreadyDecided | Error::Revoked | Error::ConsentWithdrawn | Error::LeaseLost)) => {
                    tracing::warn!(%error, serial, "a prepared step cannot be committed any more: left as an orphan");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(None)
    }

    /// The manifest of an intent, if the store has exactly that one.
    async fn probe(&self, intent: &Intent, trusted: &TrustedKeys) -> Result<Option<Manifest>, Error> {
        let serial = intent.serial;
        match self.store.get_signed_manifest(&self.policy, serial, trusted).await {
            Ok(signed) if signed.digest == intent.manifest => Ok(Some(signed.document)),
            Ok(_) => {
                tracing::error!(
                    serial,
                    "a manifest is not the one that this run was about to write: left as an orphan. Somebody else \
                     writes to the store with a key that may sign versions"
                );
                Ok(None)
            }
            Err(store::Error::NotFound(_)) => Ok(None),
            Err(
                error @ (store::Error::Corrupt { .. } | store::Error::Signature { .. } | store::Error::Document { .. }),
            ) => {
                tracing::warn!(%error, serial, "a manifest without a row is not valid: left as an orphan");
                Ok(None)
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Reads a run state. `expected`: see [`RunState::from_bytes`].
    pub async fn read_run_state(&self, key: &str, expected: Option<Digest>) -> Result<RunState, Error> {
        let bytes = self.store.get_private(key).await?;
        Ok(tokio::task::spawn_blocking(move || RunState::from_bytes(&bytes, expected)).await??)
    }
}
