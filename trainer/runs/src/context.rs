//! Rebuilds the full prompt of a generation that was logged turn by turn.
//!
//! A turn stores its new tokens, its parent's id, and the length and hash of the shared prefix. The
//! reader walks up the parents, fetches payloads, and checks the hash. Rows and payloads are read one
//! after the other, so that no transaction waits for the object store.
//!
//! A context that cannot be rebuilt has exactly one reason ([`Broken`]). Only
//! [`Broken::ParentMissing`] may be temporary, if the parent has not arrived yet. A parent of
//! another tenant counts as missing, so that nobody can find out whether it exists.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use sqlx::PgConnection;
use uuid::Uuid;

use event_log::event::{PayloadRef, TURNS_MAX};
use event_log::payload::{self, Experts, Store};

/// Parents above a generation. An episode that is scored has no more turns.
const PARENTS_MAX: usize = TURNS_MAX;

/// Why a context cannot be rebuilt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    #[error("a parent is not in the tables (of this tenant)")]
    ParentMissing,
    #[error("its parents form a cycle")]
    Cycle,
    #[error("it has more than {PARENTS_MAX} parents above it")]
    TooDeep,
    #[error("it shares more tokens than its parent has")]
    PrefixTooLong,
    #[error("the tokens shared with its parent do not have the logged hash")]
    PrefixDiffers,
    #[error("a payload is not in the store")]
    PayloadMissing,
    #[error("a payload in the store has another size or digest")]
    PayloadDiffers,
    #[error("a payload has an unknown type")]
    PayloadUnknown,
    #[error("its expert ids cannot be read or do not fit the model")]
    ExpertsDiffer,
    #[error("it is longer than the reader allows")]
    TooLong,
}

impl Broken {
    /// The code in the ledger.
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

/// The contexts could not be read. A retry may help.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("read generations")]
    Database(#[from] sqlx::Error),
    #[error("read payloads")]
    Payload(#[source] payload::Error),
}

/// Why reading one context ended.
enum Stop {
    Broken(Broken),
    Error(Error),
}

impl From<Broken> for Stop {
    fn from(broken: Broken) -> Self {
        Self::Broken(broken)
    }
}

/// Separates what is wrong with one context from errors that affect all.
fn separate<T>(read: Result<T, Stop>) -> Result<Result<T, Broken>, Error> {
    match read {
        Ok(value) => Ok(Ok(value)),
        Err(Stop::Broken(broken)) => Ok(Err(broken)),
        Err(Stop::Error(error)) => Err(error),
    }
}

/// What one turn adds.
#[derive(Debug, Clone)]
struct Turn {
    tenant: String,
    parent: Option<Uuid>,
    /// Tokens shared with the parent.
    shared: usize,
    hash: Vec<u8>,
    payload: Option<PayloadRef>,
    prompt_ids: Vec<u32>,
    token_ids: Vec<u32>,
}

/// The full prompts of these generations, each up to `tokens_max` tokens. Ids that are not in the
/// tables are omitted.
pub async fn prompts(
    connection: &mut PgConnection,
    payloads: &Store,
    ids: &[Uuid],
    tokens_max: usize,
) -> Result<BTreeMap<Uuid, Result<Vec<u32>, Broken>>, Error> {
    let lineages = Lineages::read(connection, ids).await?;
    lineages.prompts(payloads, tokens_max).await
}

/// Generations with their parents, as they are stored. Payloads are not read yet.
#[derive(Debug)]
pub struct Lineages {
    ids: Vec<Uuid>,
    turns: BTreeMap<Uuid, Turn>,
}

impl Lineages {
    /// Reads the rows. Ids that are not in the tables are omitted.
    pub async fn read(connection: &mut PgConnection, ids: &[Uuid]) -> Result<Self, Error> {
        let turns = read_turns(connection, ids).await?;
        let known = ids.iter().copied().filter(|id| turns.contains_key(id));
        Ok(Self {
            ids: known.collect(),
            turns,
        })
    }

    /// Their full prompts, each up to `tokens_max` tokens. A payload that several of them share, such
    /// as the opening of a session, is read once.
    pub async fn prompts(
        &self,
        payloads: &Store,
        tokens_max: usize,
    ) -> Result<BTreeMap<Uuid, Result<Vec<u32>, Broken>>, Error> {
        let mut found = TokenPayloads {
            store: payloads,
            read: BTreeMap::new(),
        };
        let mut prompts = BTreeMap::new();
        for id in &self.ids {
            let prompt = match lineage(&self.turns, *id) {
                Ok(lineage) => separate(build(&mut found, &lineage, tokens_max).await)?,
                Err(broken) => Err(broken),
            };
            prompts.insert(*id, prompt);
        }
        Ok(prompts)
    }
}

/// Which generations were logged with expert ids, and where those are.
#[derive(Debug)]
pub struct ExpertPayloads(BTreeMap<Uuid, (String, PayloadRef)>);

impl ExpertPayloads {
    /// Reads the rows.
    pub async fn read(connection: &mut PgConnection, ids: &[Uuid]) -> Result<Self, Error> {
        let rows = sqlx::query!(
            "select generation_id, tenant_id, digest, size_bytes, media_type from payload_reference
             where kind = 'experts' and generation_id = any($1)",
            ids
        )
        .fetch_all(connection)
        .await?;
        let payloads = rows.into_iter().map(|row| {
            let payload = PayloadRef {
                // A digest of another length is in no store.
                digest: row.digest.try_into().unwrap_or_default(),
                size_bytes: row.size_bytes.unsigned_abs(),
                media_type: row.media_type,
            };
            (row.generation_id, (row.tenant_id, payload))
        });
        Ok(Self(payloads.collect()))
    }

    /// Bytes of what was logged of a generation; 0 if nothing was.
    pub fn size(&self, id: Uuid) -> usize {
        let size = self.0.get(&id).map_or(0, |(_, payload)| payload.size_bytes);
        usize::try_from(size).unwrap_or(0)
    }

    /// What was logged of a generation, as it is stored. `None`: nothing was, or it is not there any more.
    pub async fn bytes(&self, payloads: &Store, id: Uuid) -> Result<Option<Bytes>, Error> {
        let Some((tenant, payload)) = self.0.get(&id) else {
            return Ok(None);
        };
        let read = separate(read_payload(payloads, tenant, payload, payload::EXPERTS).await)?;
        Ok(read.ok())
    }

    /// The expert ids.
    pub async fn experts(&self, payloads: &Store) -> Result<BTreeMap<Uuid, Result<Experts, Broken>>, Error> {
        let mut experts = BTreeMap::new();
        for (id, (tenant, payload)) in &self.0 {
            let read = separate(read_payload(payloads, tenant, payload, payload::EXPERTS).await)?;
            let decoded = read.and_then(|bytes| Experts::decode(&bytes).map_err(|_| Broken::ExpertsDiffer));
            experts.insert(*id, decoded);
        }
        Ok(experts)
    }
}

/// Token ids from the store, each payload read once.
struct TokenPayloads<'a> {
    store: &'a Store,
    /// By tenant and digest.
    read: BTreeMap<(String, [u8; 32]), Result<Vec<u32>, Broken>>,
}

impl TokenPayloads<'_> {
    async fn get(&mut self, tenant: &str, payload: &PayloadRef) -> Result<&[u32], Stop> {
        use std::collections::btree_map::Entry;
        if payload.media_type != payload::TOKEN_IDS {
            return Err(Broken::PayloadUnknown.into());
        }
        let read = match self.read.entry((tenant.to_owned(), payload.digest)) {
            Entry::Occupied(read) => read.into_mut(),
            Entry::Vacant(unread) => {
                let bytes = separate(read_payload(self.store, tenant, payload, payload::TOKEN_IDS).await);
                let bytes = bytes.map_err(Stop::Error)?;
                unread.insert(bytes.and_then(|bytes| payload::token_ids(&bytes).ok_or(Broken::PayloadDiffers)))
            }
        };
        match read {
            Ok(ids) => Ok(ids),
            Err(broken) => Err((*broken).into()),
        }
    }
}

/// These generations and all parents that they share tokens with, with one query per level.
async fn read_turns(connection: &mut PgConnection, ids: &[Uuid]) -> Result<BTreeMap<Uuid, Turn>, Error> {
    let mut turns = BTreeMap::new();
    let mut known: BTreeSet<Uuid> = ids.iter().copied().collect();
    let mut wanted: Vec<Uuid> = known.iter().copied().collect();
    for _ in 0..=PARENTS_MAX {
        if wanted.is_empty() {
            break;
        }
        let rows = sqlx::query_file!("src/context.sql", &wanted)
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
                    // A digest of another length is in no store.
                    digest: digest.try_into().unwrap_or_default(),
                    size_bytes: size.unsigned_abs(),
                    media_type,
                }),
                prompt_ids: row.prompt_ids.into_iter().map(i32::cast_unsigned).collect(),
                token_ids: row.token_ids.into_iter().map(i32::cast_unsigned).collect(),
            };
            let above = turn.parent.filter(|_| turn.shared > 0);
            wanted.extend(above.filter(|parent| known.insert(*parent)));
            turns.insert(row.id, turn);
        }
    }
    Ok(turns)
}

/// The turns from the one that shares nothing down to `id`.
fn lineage(turns: &BTreeMap<Uuid, Turn>, id: Uuid) -> Result<Vec<&Turn>, Broken> {
    let mut lineage: Vec<&Turn> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut at = Some(id);
    while let Some(id) = at {
        if !seen.insert(id) {
            return Err(Broken::Cycle);
        }
        if lineage.len() > PARENTS_MAX {
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

/// Concatenates the turns of a lineage, each up to where the next one shares it. Only the hash of
/// the last turn is checked, because it covers all turns before.
async fn build(store: &mut TokenPayloads<'_>, lineage: &[&Turn], tokens_max: usize) -> Result<Vec<u32>, Stop> {
    let (last, above) = lineage.split_last().ok_or(Broken::ParentMissing)?;
    if last.shared > tokens_max {
        return Err(Broken::TooLong.into());
    }
    // How many tokens of each turn's context the turns below it need.
    let mut needed = vec![last.shared; above.len()];
    for index in (1..above.len()).rev() {
        needed[index - 1] = needed[index].min(above[index].shared);
    }
    let mut context: Vec<u32> = Vec::new();
    for (turn, needed) in above.iter().zip(needed) {
        if turn.shared.min(needed) > context.len() {
            return Err(Broken::PrefixTooLong.into());
        }
        context.truncate(turn.shared.min(needed));
        add_prompt(store, turn, &mut context, tokens_max).await?;
        context.extend(&turn.token_ids);
        context.truncate(needed);
    }
    if context.len() < last.shared {
        return Err(Broken::PrefixTooLong.into());
    }
    let differs = || blake3::hash(&payload::token_bytes(&context)).as_bytes()[..] != last.hash[..];
    if last.shared > 0 && differs() {
        return Err(Broken::PrefixDiffers.into());
    }
    add_prompt(store, last, &mut context, tokens_max).await?;
    if context.len() > tokens_max {
        return Err(Broken::TooLong.into());
    }
    Ok(context)
}

/// Adds a turn's prompt after its shared prefix.
async fn add_prompt(
    store: &mut TokenPayloads<'_>,
    turn: &Turn,
    context: &mut Vec<u32>,
    tokens_max: usize,
) -> Result<(), Stop> {
    if let Some(payload) = &turn.payload {
        let left = tokens_max.saturating_sub(context.len());
        if payload.media_type == payload::TOKEN_IDS && payload.size_bytes / 4 > left as u64 {
            return Err(Broken::TooLong.into());
        }
        context.extend(store.get(&turn.tenant, payload).await?);
    }
    context.extend(&turn.prompt_ids);
    Ok(())
}

async fn read_payload(store: &Store, tenant: &str, payload: &PayloadRef, media_type: &str) -> Result<Bytes, Stop> {
    if payload.media_type != media_type {
        return Err(Broken::PayloadUnknown.into());
    }
    store.get(tenant, payload).await.map_err(|error| match error {
        payload::Error::Missing => Broken::PayloadMissing.into(),
        payload::Error::Differs(_) => Broken::PayloadDiffers.into(),
        error => Stop::Error(Error::Payload(error)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_payload_that_opens_a_session_is_read_once() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&format!("file://{}", dir.path().display())).unwrap();
        let bytes = payload::token_bytes(&[5, 6, 7]);
        let opening = store.put("t", bytes.into(), payload::TOKEN_IDS).await.unwrap();
        let mut found = TokenPayloads {
            store: &store,
            read: BTreeMap::new(),
        };
        assert!(matches!(found.get("t", &opening).await, Ok([5, 6, 7])));
        std::fs::remove_dir_all(dir.path()).unwrap();
        assert!(matches!(found.get("t", &opening).await, Ok([5, 6, 7])));
        // another tenant's is not shown, and is missing
        for _ in 0..2 {
            let other = found.get("u", &opening).await;
            assert!(matches!(other, Err(Stop::Broken(Broken::PayloadMissing))));
        }
        let unknown = PayloadRef {
            media_type: "text/plain".into(),
            ..opening
        };
        let unknown = found.get("t", &unknown).await;
        assert!(matches!(unknown, Err(Stop::Broken(Broken::PayloadUnknown))));
    }

    /// One generation after another, each with the one before as its parent.
    fn session(turns: usize) -> BTreeMap<Uuid, Turn> {
        let id = |nth: usize| Uuid::from_u128(nth as u128 + 1);
        let turn = |nth: usize| Turn {
            tenant: "default".to_owned(),
            parent: nth.checked_sub(1).map(id),
            shared: nth,
            hash: Vec::new(),
            payload: None,
            prompt_ids: Vec::new(),
            token_ids: vec![1],
        };
        (0..turns).map(|nth| (id(nth), turn(nth))).collect()
    }

    #[test]
    fn the_last_turn_of_the_longest_episode_has_a_context() {
        let last = |turns: &BTreeMap<Uuid, Turn>| *turns.keys().next_back().unwrap();
        let longest = session(TURNS_MAX);
        assert_eq!(lineage(&longest, last(&longest)).unwrap().len(), TURNS_MAX);
        let longer = session(PARENTS_MAX + 2);
        assert_eq!(lineage(&longer, last(&longer)).err(), Some(Broken::TooDeep));
    }
}
