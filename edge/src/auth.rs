//! Who calls: an API key in `Authorization: Bearer`, or as the password of `Basic` for clients that know nothing else (those
//! of Langfuse), checked against `api_key` by its BLAKE3 digest. Deliberately no sessions, no users and no passwords of
//! people: a key belongs to a service or to a person's tool, and has one role.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context;
use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::{HeaderMap, header, request::Parts};
use axum::middleware::{self, Next};
use axum::response::Response;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rand::TryRngCore;
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

use crate::problem::Problem;

/// How long a looked-up key is believed: a revoked key may work for this much longer.
const CACHE_FOR: Duration = Duration::from_secs(30);
/// Keys remembered at once, known and unknown ones together.
const CACHE_ENTRIES_MAX: usize = 10_000;
const SECRET_PREFIX: &str = "spring_";

/// What a key may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Ask for completions, log generations, give feedback.
    Serving,
    /// Schedule and read training runs.
    Research,
    /// Move versions to users.
    Release,
    /// Everything.
    Admin,
}

impl Role {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Serving => "serving",
            Self::Research => "research",
            Self::Release => "release",
            Self::Admin => "admin",
        }
    }

    fn parse(text: &str) -> Option<Self> {
        [Self::Serving, Self::Research, Self::Release, Self::Admin]
            .into_iter()
            .find(|role| role.as_str() == text)
    }
}

/// Who may call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AuthOptions {
    /// Whether every call must carry a key. Without, every caller is the operator of the tenant `default`, and only
    /// loopback may be bound. Default: false.
    pub required: bool,
}

/// The caller of a request; an extension of every request behind [`Auth::protect`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    pub tenant: String,
    pub role: Role,
    /// For people and audits: who holds the key.
    pub label: String,
}

impl Principal {
    fn operator() -> Self {
        Self {
            tenant: "default".to_owned(),
            role: Role::Admin,
            label: "operator".to_owned(),
        }
    }

    /// Who holds a place's one key.
    fn caller() -> Self {
        Self {
            role: Role::Serving,
            label: "caller".to_owned(),
            ..Self::operator()
        }
    }

    /// Refuses a caller whose role is none of `allowed`; an admin may do everything.
    pub fn require(&self, allowed: &[Role]) -> Result<(), Problem> {
        if self.role == Role::Admin || allowed.contains(&self.role) {
            return Ok(());
        }
        let allowed: Vec<_> = allowed.iter().map(|role| role.as_str()).collect();
        Err(Problem::forbidden(format!(
            "this needs one of the roles {}, the key has {}",
            allowed.join(", "),
            self.role.as_str()
        )))
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Principal {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let principal = parts.extensions.get::<Self>().cloned();
        principal.ok_or_else(|| Problem::internal("a route that needs a caller is not protected"))
    }
}

/// Checks keys. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Auth(Keys);

#[derive(Debug, Clone)]
enum Keys {
    /// Every caller is the operator.
    Open,
    /// One key, known by its digest, with the role of a service that logs; for places without a database.
    Fixed([u8; 32]),
    /// Those of the table.
    Table { pool: PgPool, cache: Arc<Cache> },
}

#[derive(Debug, Clone)]
struct Looked {
    at: Instant,
    principal: Option<Principal>,
}

impl Auth {
    pub fn new(options: AuthOptions, pool: PgPool) -> Self {
        if !options.required {
            return Self(Keys::Open);
        }
        Self(Keys::Table {
            pool,
            cache: Arc::default(),
        })
    }

    /// Asks for this one key; without, for none.
    pub fn fixed(key: Option<&str>) -> Self {
        Self(key.map_or(Keys::Open, |key| Keys::Fixed(digest(key))))
    }

    pub fn required(&self) -> bool {
        !matches!(self.0, Keys::Open)
    }

    /// Puts every route of `router` behind the check; handlers take a [`Principal`] and call [`Principal::require`].
    pub fn protect(&self, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(self.clone(), check))
    }

    /// Who sent these headers.
    pub async fn principal(&self, headers: &HeaderMap) -> Result<Principal, Problem> {
        if !self.required() {
            return Ok(Principal::operator());
        }
        let secret =
            secret(headers).ok_or_else(|| Problem::unauthorized("send the key as `Authorization: Bearer <key>`"))?;
        let digest = digest(&secret);
        let principal = match &self.0 {
            Keys::Open => Some(Principal::operator()),
            // Of digests, how far two agree tells nothing about a key.
            Keys::Fixed(only) => (digest == *only).then(Principal::caller),
            Keys::Table { pool, cache } => match cached(cache, &digest) {
                Some(looked) => looked,
                None => {
                    let found = look_up(pool, &digest).await.map_err(|error| {
                        tracing::warn!(error = %format!("{error:#}"), "API key could not be checked");
                        Problem::unavailable("keys cannot be checked right now", 2)
                    })?;
                    remember(cache, digest, found.clone());
                    found
                }
            },
        };
        principal.ok_or_else(|| Problem::unauthorized("the key is unknown or revoked"))
    }
}

type Cache = Mutex<HashMap<[u8; 32], Looked>>;

/// The outer `None`: not looked up lately. The inner one: looked up, and unknown.
fn cached(cache: &Cache, digest: &[u8; 32]) -> Option<Option<Principal>> {
    let cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    let looked = cache.get(digest)?;
    (looked.at.elapsed() < CACHE_FOR).then(|| looked.principal.clone())
}

fn remember(cache: &Cache, digest: [u8; 32], principal: Option<Principal>) {
    let mut cache = cache.lock().unwrap_or_else(PoisonError::into_inner);
    if cache.len() >= CACHE_ENTRIES_MAX {
        cache.retain(|_, looked| looked.at.elapsed() < CACHE_FOR);
    }
    if cache.len() < CACHE_ENTRIES_MAX {
        let at = Instant::now();
        cache.insert(digest, Looked { at, principal });
    }
}

fn digest(key: &str) -> [u8; 32] {
    *blake3::hash(key.as_bytes()).as_bytes()
}

/// Makes a key of `role` for `tenant` and returns its secret, which is stored nowhere. The tenant is created if new.
pub async fn create_key(pool: &PgPool, tenant: &str, role: Role, label: &str) -> anyhow::Result<String> {
    let mut random = [0_u8; 32];
    rand::rngs::OsRng
        .try_fill_bytes(&mut random)
        .context("draw random bytes")?;
    let secret = format!("{SECRET_PREFIX}{}", hex::encode(random));
    let digest = digest(&secret);
    let mut transaction = pool.begin().await.context("begin")?;
    sqlx::query!("insert into tenant (id) values ($1) on conflict do nothing", tenant)
        .execute(&mut *transaction)
        .await
        .context("create tenant")?;
    sqlx::query!(
        "insert into api_key (tenant_id, role, digest, label) values ($1, $2, $3, $4)",
        tenant,
        role.as_str(),
        digest.as_slice(),
        label
    )
    .execute(&mut *transaction)
    .await
    .context("store key")?;
    transaction.commit().await.context("commit")?;
    Ok(secret)
}

async fn check(State(auth): State<Auth>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let principal = auth.principal(request.headers()).await?;
    request.extensions_mut().insert(principal);
    Ok(next.run(request).await)
}

async fn look_up(pool: &PgPool, digest: &[u8; 32]) -> anyhow::Result<Option<Principal>> {
    let row = sqlx::query!(
        "select tenant_id, role, label from api_key where digest = $1 and revoked_at is null",
        digest.as_slice()
    )
    .fetch_optional(pool)
    .await
    .context("look up key")?;
    row.map(|row| {
        let role =
            Role::parse(&row.role).with_context(|| format!("role {:?} is not known to this program", row.role))?;
        Ok(Principal {
            tenant: row.tenant_id,
            role,
            label: row.label,
        })
    })
    .transpose()
}

fn secret(headers: &HeaderMap) -> Option<String> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, credentials) = value.split_once(' ')?;
    let credentials = credentials.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(credentials.to_owned());
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let pair = String::from_utf8(BASE64_STANDARD.decode(credentials).ok()?).ok()?;
    // The user's name says nothing: the key knows its tenant.
    let (_, password) = pair.split_once(':')?;
    Some(password.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_read_as_bearer_or_as_basic_password_whatever_the_case_of_the_scheme() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            secret(&headers)
        };
        assert_eq!(read("bearer spring_1").as_deref(), Some("spring_1"));
        // "anyone:spring_1"
        assert_eq!(read("BASIC YW55b25lOnNwcmluZ18x").as_deref(), Some("spring_1"));
        // "spring_1", no password; not Base64; another scheme.
        for value in ["Basic c3ByaW5nXzE=", "Basic !", "Digest spring_1", "spring_1"] {
            assert_eq!(read(value), None, "{value}");
        }
    }

    #[test]
    fn a_role_may_do_its_own_work_and_an_admin_everything() {
        let research = Principal {
            role: Role::Research,
            ..Principal::operator()
        };
        assert!(research.require(&[Role::Research, Role::Release]).is_ok());
        assert_eq!(
            research.require(&[Role::Release]).unwrap_err().status,
            axum::http::StatusCode::FORBIDDEN
        );
        assert!(Principal::operator().require(&[Role::Release]).is_ok());
    }

    #[tokio::test]
    async fn one_fixed_key_opens_and_no_other() {
        let auth = Auth::fixed(Some("spring_right"));
        assert!(auth.required());
        let mut headers = HeaderMap::new();
        for (sent, role) in [
            (None, None),
            (Some("Bearer spring_wrong"), None),
            (Some("Bearer spring_right"), Some(Role::Serving)),
        ] {
            if let Some(sent) = sent {
                headers.insert(header::AUTHORIZATION, sent.parse().unwrap());
            }
            let principal = auth.principal(&headers).await.ok();
            assert_eq!(principal.map(|principal| principal.role), role);
        }
        assert!(!Auth::fixed(None).required());
    }

    #[test]
    fn every_role_survives_its_text() {
        for role in [Role::Serving, Role::Research, Role::Release, Role::Admin] {
            assert_eq!(Role::parse(role.as_str()), Some(role));
        }
        assert_eq!(Role::parse("root"), None);
    }
}
