//! The whole prompt of a generation that was logged turn by turn: a turn has only its new tokens, its parent, and the length
//! and hash of what it shares with it. Walks up the parents, fetches payloads, and holds the result against the hash.
//!
//! What cannot be put together has exactly one of the reasons of [`Broken`]; only [`Broken::ParentMissing`] may heal by itself,
//! when a parent arrives that is still on its way. A parent of another tenant is as missing as one that never was: whoever
//! names it must not learn that it is there.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use sqlx::PgConnection;
use uuid::Uuid;

use crate::event::PayloadRef;
use crate::payload::{self, Experts, Store};

/// Parents above one generation.
const TURNS_MAX: usize = 1024;

/// Why a context cannot be put together. The codes are those of the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("a parent is not in the tables (of this tenant)")]
    ParentMissing,
    #[error("its parents go round in a circle")]
    Cycle,
    #[error("it has more than {TURNS_MAX} parents above it")]
    TooDeep,
    #[error("it shares more tokens than its parent has")]
    PrefixTooLong,
    #[error("what it shares with its parent has another hash than it says")]
    PrefixDiffers,
    #[error("a payload is not in the store")]
    PayloadMissing,
    #[error("a payload in the store has another size or digest")]
    PayloadDiffers,
    #[error("a payload is of a type that is not known here")]
    PayloadUnknown,
    #[error("what is said to be expert ids are none, or do not fit the model")]
    ExpertsDiffer,
    #[error("it is longer than the reader takes")]
    TooLong,
}

impl Broken {
    /// As a code of the ledger.
    pub fn code(self) -> &'static str {
        match self {
            Self::ParentMissing => "parent_missing",
            Self::Cycle => "context_cycle",
            Self::TooDeep => "context_too_deep",
            Self::PrefixTooLong => "prefix_too_long",
            Self::PrefixDiffers => "prefix_differs",
            Self::PayloadMissing => "payload_missing",
            Self::PayloadDiffers => "payload_differs",
            Self::PayloadUnknown => "payload_unknown",
            Self::ExpertsDiffer => "experts_differ",
            Self::TooLong => "longer_than_context",
        }
    }
}

/// Nothing is known about the contexts: ask again.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read generations")]
    Database(#[from] sqlx::Error),
    #[error("read payloads")]
    Payload(#[source] payload::Error),
}

/// What one turn adds.
#[derive(Debug, Clone)]
struct Turn {
    tenant: String,
    parent: Option<Uuid>,
    shared: usize,
    hash: Vec<u8>,
    payload: Option<PayloadRef>,
    prompt_ids: Vec<u32>,
    token_ids: Vec<u32>,
}

/// The whole prompts of these generations, `tokens_max` tokens each at most; ids that the tables do not hold are left out.
pub async fn prompts(
    connection: &mut PgConnection,
    payloads: &Store,
    ids: &[Uuid],
    tokens_max: usize,
) -> Result<BTreeMap<Uuid, Result<Vec<u32>, Broken>>, Error> {
    let turns = climb(connection, ids).await?;
    let mut prompts = BTreeMap::new();
    for id in ids {
        if turns.contains_key(id) {
            let prompt = match lineage(&turns, *id) {
                Ok(lineage) => build(payloads, &lineage, tokens_max).await?,
                Err(broken) => Err(broken),
            };
            prompts.insert(*id, prompt);
        }
    }
    Ok(prompts)
}

/// The experts that sampled, of those of these generations that a mixture of experts sampled and that were logged with them.
pub async fn experts(
    connection: &mut PgConnection,
    payloads: &Store,
    ids: &[Uuid],
) -> Result<BTreeMap<Uuid, Result<Experts, Broken>>, Error> {
    let rows = sqlx::query!(
        "select generation_id, tenant_id, digest, size_bytes, media_type from payload_reference
         where kind = 'experts' and generation_id = any($1)",
        ids
    )
    .fetch_all(connection)
    .await?;
    let mut experts = BTreeMap::new();
    for row in rows {
        let payload = PayloadRef {
            // A digest of another length is nobody's.
            digest: row.digest.try_into().unwrap_or_default(),
            size_bytes: row.size_bytes.unsigned_abs(),
            media_type: row.media_type,
        };
        let read = match read(payloads, &row.tenant_id, &payload, payload::EXPERTS).await? {
            Ok(bytes) => Experts::decode(&bytes).map_err(|_| Broken::ExpertsDiffer),
            Err(broken) => Err(broken),
        };
        experts.insert(row.generation_id, read);
    }
    Ok(experts)
}

/// These generations and everything above them that they share tokens with, a level a query.
async fn climb(connection: &mut PgConnection, ids: &[Uuid]) -> Result<BTreeMap<Uuid, Turn>, Error> {
    let mut turns = BTreeMap::new();
    let mut asked: BTreeSet<Uuid> = ids.iter().copied().collect();
    let mut wanted: Vec<Uuid> = asked.iter().copied().collect();
    for _ in 0..=TURNS_MAX {
        if wanted.is_empty() {
            break;
        }
        let rows = sqlx::query_file!("src/context/turns.sql", &wanted)
            .fetch_all(&mut *connection)
            .await?;
        wanted.clear();
        for row in rows {
            let payload = row.digest.zip(row.size_bytes).zip(row.media_type);
            let turn = Turn {
                tenant: row.tenant_id,
                parent: row.parent_id,
                shared: usize::try_from(row.prompt_prefix_len).unwrap_or(0),
                hash: row.prompt_prefix_hash.unwrap_or_default(),
                payload: payload.map(|((digest, size), media_type)| PayloadRef {
                    // A digest of another length is nobody's.
                    digest: digest.try_into().unwrap_or_default(),
                    size_bytes: size.unsigned_abs(),
                    media_type,
                }),
                prompt_ids: row.prompt_ids.into_iter().map(i32::cast_unsigned).collect(),
                token_ids: row.token_ids.into_iter().map(i32::cast_unsigned).collect(),
            };
            let above = turn.parent.filter(|_| turn.shared > 0);
            wanted.extend(above.filter(|parent| asked.insert(*parent)));
            turns.insert(row.id, turn);
        }
    }
    Ok(turns)
}

/// From the turn that shares nothing down to `id`.
fn lineage(turns: &BTreeMap<Uuid, Turn>, id: Uuid) -> Result<Vec<&Turn>, Broken> {
    let mut lineage: Vec<&Turn> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut at = Some(id);
    while let Some(id) = at {
        if !seen.insert(id) {
            return Err(Broken::Cycle);
        }
        if lineage.len() > TURNS_MAX {
            return Err(Broken::TooDeep);
        }
        let turn = turns.get(&id).ok_or(Broken::ParentMissing)?;
        if lineage.first().is_some_and(|leaf| leaf.tenant != turn.tenant) {
            return Err(Broken::ParentMissing);
        }
        lineage.push(turn);
        at = turn.parent.filter(|_| turn.shared > 0);
    }
    lineage.reverse();
    Ok(lineage)
}

/// Goes down the lineage, and takes no more of each turn than the one below shares with it. Only the hash of the last turn
/// counts: it covers everything that the others added.
async fn build(store: &Store, lineage: &[&Turn], tokens_max: usize) -> Result<Result<Vec<u32>, Broken>, Error> {
    let Some((last, above)) = lineage.split_last() else {
        return Ok(Err(Broken::ParentMissing));
    };
    if last.shared > tokens_max {
        return Ok(Err(Broken::TooLong));
    }
    let mut needed = vec![last.shared; above.len()];
    for index in (1..above.len()).rev() {
        needed[index - 1] = needed[index].min(above[index].shared);
    }
    let mut context: Vec<u32> = Vec::new();
    for (turn, needed) in above.iter().zip(needed) {
        if turn.shared.min(needed) > context.len() {
            return Ok(Err(Broken::PrefixTooLong));
        }
        context.truncate(turn.shared.min(needed));
        if let Err(broken) = extend(store, turn, &mut context, tokens_max).await? {
            return Ok(Err(broken));
        }
        context.extend(&turn.token_ids);
        context.truncate(needed);
    }
    if context.len() < last.shared {
        return Ok(Err(Broken::PrefixTooLong));
    }
    let differs = || blake3::hash(&payload::token_bytes(&context)).as_bytes()[..] != last.hash[..];
    if last.shared > 0 && differs() {
        return Ok(Err(Broken::PrefixDiffers));
    }
    if let Err(broken) = extend(store, last, &mut context, tokens_max).await? {
        return Ok(Err(broken));
    }
    if context.len() > tokens_max {
        return Ok(Err(Broken::TooLong));
    }
    Ok(Ok(context))
}

/// The rest of a turn's prompt behind what it shares.
async fn extend(
    store: &Store,
    turn: &Turn,
    context: &mut Vec<u32>,
    tokens_max: usize,
) -> Result<Result<(), Broken>, Error> {
    if let Some(payload) = &turn.payload {
        match fetch(store, turn, payload, tokens_max.saturating_sub(context.len())).await? {
            Ok(ids) => context.extend(ids),
            Err(broken) => return Ok(Err(broken)),
        }
    }
    context.extend(&turn.prompt_ids);
    Ok(Ok(()))
}

async fn fetch(
    store: &Store,
    turn: &Turn,
    payload: &PayloadRef,
    tokens_max: usize,
) -> Result<Result<Vec<u32>, Broken>, Error> {
    if payload.media_type == payload::TOKEN_IDS && payload.size_bytes / 4 > tokens_max as u64 {
        return Ok(Err(Broken::TooLong));
    }
    let read = read(store, &turn.tenant, payload, payload::TOKEN_IDS).await?;
    Ok(read.and_then(|bytes| payload::token_ids(&bytes).ok_or(Broken::PayloadDiffers)))
}

async fn read(
    store: &Store,
    tenant: &str,
    payload: &PayloadRef,
    media_type: &str,
) -> Result<Result<Bytes, Broken>, Error> {
    if payload.media_type != media_type {
        return Ok(Err(Broken::PayloadUnknown));
    }
    match store.get(tenant, payload).await {
        Ok(bytes) => Ok(Ok(bytes)),
        Err(payload::Error::Missing) => Ok(Err(Broken::PayloadMissing)),
        Err(payload::Error::Differs(_)) => Ok(Err(Broken::PayloadDiffers)),
        Err(error) => Err(Error::Payload(error)),
    }
}
