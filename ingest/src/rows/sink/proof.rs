//! Verifies who sampled the generations of a batch, before they are stored.
//!
//! The trainer verifies again what it trains on. Here it is about what others only count: a
//! generation that is not proven holds no cohort back.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use event_log::event::{Generation, signed_bytes};
use sqlx::PgConnection;
use uuid::Uuid;

use super::write::Error;
use crate::rows::insert::{Checked, Row};

/// How long a sampler's row is used without being read again, so a revocation counts after this time.
const KNOWN_FOR: Duration = Duration::from_secs(5);

/// The registered samplers that have signed something lately.
#[derive(Default)]
pub struct Samplers(Mutex<HashMap<String, Sampler>>);

#[derive(Clone)]
struct Sampler {
    read_at: Instant,
    public_key: Arc<[u8]>,
    /// What the generation's replica must be.
    name: String,
    /// The only policy it samples. `None`: every policy.
    policy: Option<String>,
    /// Revoked or expired.
    ended: bool,
}

impl Sampler {
    fn may_sign(&self, body: &Generation) -> bool {
        !self.ended && self.name == body.replica && self.policy.as_ref().is_none_or(|policy| *policy == body.policy)
    }
}

/// A signature to verify.
struct Signature {
    generation: Uuid,
    public_key: Arc<[u8]>,
    message: Vec<u8>,
    signature: [u8; 64],
}

impl Samplers {
    /// The generations that have a proof: the digest that was signed, and whether the proof is good.
    pub(super) async fn check(
        &self,
        connection: &mut PgConnection,
        rows: &[Row<'_, Generation>],
    ) -> Result<HashMap<Uuid, Checked>, Error> {
        let proofs = rows.iter().filter_map(|row| row.body.proof.as_ref());
        let names: HashSet<&str> = proofs.map(|proof| proof.sampler.as_str()).collect();
        if names.is_empty() {
            return Ok(HashMap::new());
        }
        self.read(connection, names).await?;
        let (checked, signatures) = self.prepare(rows);
        // tens of microseconds each
        let verified = tokio::task::spawn_blocking(move || verify(checked, signatures)).await;
        verified.map_err(|error| Error::Transient(error.into()))
    }

    /// Reads those that are not known yet, or not lately. Unknown ones are asked for each time: their
    /// names are the senders' choice, so they are not kept.
    async fn read(&self, connection: &mut PgConnection, mut names: HashSet<&str>) -> sqlx::Result<()> {
        let read_at = Instant::now();
        {
            let known = self.lock();
            names.retain(|name| known.get(*name).is_none_or(|known| known.read_at.elapsed() > KNOWN_FOR));
        }
        if names.is_empty() {
            return Ok(());
        }
        let names: Vec<String> = names.into_iter().map(str::to_owned).collect();
        // by the time that the generations of this transaction are stored at
        let samplers = sqlx::query!(
            r#"
            select id, public_key, name, policy, revoked_at is not null or coalesce(expires_at <= now(), false) as "ended!"
            from sampler
            where id = any($1)
            "#,
            &names
        )
        .fetch_all(connection)
        .await?;
        let mut known = self.lock();
        // nobody deletes samplers, but if somebody does, they are not known any more
        names.iter().for_each(|name| drop(known.remove(name)));
        known.extend(samplers.into_iter().map(|row| {
            let sampler = Sampler {
                read_at,
                public_key: row.public_key.into(),
                name: row.name,
                policy: row.policy,
                ended: row.ended,
            };
            (row.id, sampler)
        }));
        Ok(())
    }

    fn prepare(&self, rows: &[Row<'_, Generation>]) -> (HashMap<Uuid, Checked>, Vec<Signature>) {
        let (mut checked, mut signatures) = (HashMap::new(), Vec::new());
        let known = self.lock();
        for row in rows {
            let Some(proof) = &row.body.proof else { continue };
            let digest = row.body.unsigned_digest();
            let sampler = known.get(&proof.sampler);
            // if true, the signature is left to verify
            let proven = sampler.map(|sampler| sampler.may_sign(row.body));
            if let Some(sampler) = sampler.filter(|_| proven == Some(true)) {
                signatures.push(Signature {
                    generation: row.body.id,
                    public_key: sampler.public_key.clone(),
                    message: signed_bytes(&row.event.tenant, row.event.time, &digest),
                    signature: proof.signature,
                });
            }
            checked.insert(row.body.id, Checked { digest, proven });
        }
        (checked, signatures)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Sampler>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn verify(mut checked: HashMap<Uuid, Checked>, signatures: Vec<Signature>) -> HashMap<Uuid, Checked> {
    for one in signatures {
        let good = edge::sampler::verify(&one.public_key, &one.message, &one.signature);
        if let Some(checked) = checked.get_mut(&one.generation) {
            checked.proven = Some(good);
        }
    }
    checked
}
