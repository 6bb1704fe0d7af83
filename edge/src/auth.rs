//! Authenticates callers by an API key in `Authorization: Bearer` or `x-api-key`, found in `api_key`
//! by its BLAKE3 digest. Roles with pages for browsers also take it from a [`cookie`].
//!
//! A key belongs to a service, a tool or a person and has scopes. With an identity provider ([`oidc`]), its tokens
//! count as keys. There are no sessions, users or passwords here.

pub mod cookie;
pub mod key;
mod known;
mod limits;
pub mod oidc;
mod scope;

use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;

use axum::Router;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::{HeaderMap, header, request::Parts};
use axum::middleware::{self, Next};
use axum::response::Response;
use sqlx::PgPool;
use uuid::Uuid;

pub use known::Guesses;
pub use limits::{LimitOptions, REQUESTS_PER_SECOND_MAX};
pub use scope::{Role, Scope, Scopes};

use crate::audit::Actor;
use crate::held::until_sent;
use crate::problem::Problem;
use known::{KnownKeys, Unavailable};
use limits::Limits;
use oidc::{Provider, Use};

/// The tenant of every caller where no key is needed.
pub const OPEN_TENANT: &str = "default";

crate::options! {
    /// `[auth]` of the configuration file.
    #[derive(Eq)]
    pub struct AuthOptions {
        /// Whether every request needs an API key (`springtide key create`). If not, every caller is
        /// an admin of the tenant `default`, and servers may listen on loopback addresses only.
        pub required: bool = false,
        pub limits: LimitOptions,
        /// An identity provider whose tokens count as keys, for roles with a database. Default: none.
        #[serde(skip_serializing_if = "Option::is_none")]
        pub oidc: Option<oidc::OidcOptions> = None,
    }
}

/// The caller of a request. [`Auth::protect`] adds it to the request's extensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    pub tenant: String,
    pub scopes: Scopes,
    /// Who holds the key, for people.
    pub label: String,
    /// `None`: not a key of the table, nor a token of the provider.
    pub key: Option<KeyId>,
    /// The only replica that the key may report for.
    pub replica: Option<String>,
    /// Instead of the configured limit.
    pub requests_per_second: Option<NonZeroU32>,
    /// A person, not a program: who has logged in at the identity provider. Without a provider nobody knows, and it is
    /// true of all.
    pub is_person: bool,
}

/// Identifies a key. Its secret is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyId {
    pub id: Uuid,
    /// Shared with the keys that it replaces and that replace it.
    pub lineage: Uuid,
}

impl Principal {
    /// Whether feedback from this key must prove that it comes from who was answered. The keys of back
    /// ends, which may also request or log generations, are trusted.
    pub fn needs_feedback_token(&self) -> bool {
        let trusted = [Scope::Completions, Scope::Generations, Scope::Research];
        !trusted.into_iter().any(|scope| self.scopes.allow(scope))
    }

    /// Fails for keys whose feedback needs a token, where none can be given.
    pub fn require_trusted(&self) -> Result<(), Problem> {
        match self.needs_feedback_token() {
            true => Err(Problem::forbidden(
                "this key may only give feedback with a token, at POST /v1/feedback; a key that also has the scope \
                 `completions`, `generations` or `research` needs none",
            )),
            false => Ok(()),
        }
    }

    /// A caller with the scopes of `role` and without a key of the table.
    pub fn with_role(tenant: &str, role: Role, label: &str) -> Self {
        Self {
            tenant: tenant.to_owned(),
            scopes: role.scopes(),
            label: label.to_owned(),
            key: None,
            replica: None,
            requests_per_second: None,
            is_person: true,
        }
    }

    /// Everybody, where no key is needed.
    fn operator() -> Self {
        Self::with_role(OPEN_TENANT, Role::Admin, "operator")
    }

    /// The holder of the key given to [`Auth::fixed`].
    fn caller() -> Self {
        Self::with_role(OPEN_TENANT, Role::Serving, "caller")
    }

    /// Fails unless the key has the scope.
    pub fn require(&self, scope: Scope) -> Result<(), Problem> {
        if self.scopes.allow(scope) {
            return Ok(());
        }
        let scope = scope.as_str();
        Err(Problem::forbidden(format!(
            "this needs a key with the scope {scope}, but the key has only {}; \
             `springtide key create --scope {scope}` makes one",
            self.scopes
        )))
    }

    /// The key whose demonstrations the realtime run may learn: it has the scope `teach`. Nil: no key is needed.
    pub fn teacher(&self) -> Option<Uuid> {
        let key = self.key.map_or(Uuid::nil(), |key| key.id);
        self.scopes.allow(Scope::Teach).then_some(key)
    }

    /// For the audit.
    pub fn actor(&self) -> Actor<'_> {
        Actor {
            key: self.key.map(|key| key.id),
            name: &self.label,
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Principal {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Problem> {
        let principal = parts.extensions.get::<Self>().cloned();
        principal.ok_or_else(|| Problem::internal("the route is not behind Auth::protect"))
    }
}

/// Checks API keys, and limits what their holders ask for. Cheap to clone; clones share the limits.
#[derive(Debug, Clone)]
pub struct Auth {
    keys: Keys,
    /// `None`: no limits, because callers cannot be told apart.
    limits: Option<Arc<Limits>>,
    /// Whether the key may also come in a cookie.
    cookies: bool,
    provider: Option<Arc<Provider>>,
}

#[derive(Debug, Clone)]
enum Keys {
    /// No key needed: every caller is an admin.
    Open,
    /// The digest of the only valid key, which has the role `serving`. For roles without a
    /// database.
    Fixed([u8; 32]),
    /// The table `api_key`.
    Table(Arc<KnownKeys>),
}

impl Auth {
    pub fn new(options: AuthOptions, pool: PgPool) -> Self {
        match options.required {
            true => Self {
                keys: Keys::Table(KnownKeys::new(pool)),
                limits: Some(Limits::new(options.limits)),
                cookies: false,
                provider: options.oidc.map(Provider::new).map(Arc::new),
            },
            false => Self::fixed(None),
        }
    }

    /// Accepts only `key`. With `None` no key is needed.
    pub fn fixed(key: Option<&str>) -> Self {
        Self {
            keys: key.map_or(Keys::Open, |key| Keys::Fixed(digest(key))),
            limits: None,
            cookies: false,
            provider: None,
        }
    }

    /// Whose tokens count as keys.
    pub fn provider(&self) -> Option<&Arc<Provider>> {
        self.provider.as_ref()
    }

    /// Also takes the key from a [`cookie`], where no header has one. For roles with pages.
    #[must_use]
    pub fn with_cookies(self) -> Self {
        Self { cookies: true, ..self }
    }

    /// Limits all callers together, if a key is needed; 0: no limit. For [`Auth::fixed`], whose
    /// callers share one key.
    #[must_use]
    pub fn requests_per_second_max(self, requests: u32) -> Self {
        let limits = self
            .required()
            .then(|| Limits::new(LimitOptions::of_all_callers(requests)));
        Self { limits, ..self }
    }

    pub fn required(&self) -> bool {
        !matches!(self.keys, Keys::Open)
    }

    /// Requires a valid key on every route of `router`, and limits what its holder asks for. What the
    /// key may do is up to the route: see [`crate::routes`] and [`Principal::require`].
    pub fn protect(&self, router: Router) -> Router {
        router.layer(middleware::from_fn_with_state(self.clone(), check))
    }

    /// `router`, which needs a key with the scope `read` if other machines reach `address`.
    pub fn protect_beyond_loopback(&self, router: Router, address: SocketAddr) -> Router {
        if address.ip().to_canonical().is_loopback() {
            return router;
        }
        let reads = async |principal: Principal, request: Request, next: Next| {
            principal.require(Scope::Read)?;
            Ok::<Response, Problem>(next.run(request).await)
        };
        self.protect(router.layer(middleware::from_fn(reads)))
    }

    /// The caller that these headers authenticate.
    pub async fn principal(&self, headers: &HeaderMap) -> Result<Principal, Problem> {
        self.holder(secret(headers), &Guesses::default()).await
    }

    /// Who holds this key, or this access token. `guesses`: of the connection.
    pub async fn holder(&self, secret: Option<&str>, guesses: &Guesses) -> Result<Principal, Problem> {
        self.holder_of(secret, Use::Access, guesses).await
    }

    async fn holder_of(&self, secret: Option<&str>, used: Use, guesses: &Guesses) -> Result<Principal, Problem> {
        if !self.required() {
            return Ok(Principal::operator());
        }
        if let (Some(provider), Some(token)) = (&self.provider, secret.filter(|secret| oidc::is_token(secret))) {
            return provider.verify(token, used).await;
        }
        let secret = secret.ok_or_else(|| Problem::unauthorized("send the key as `Authorization: Bearer <key>`"))?;
        let digest = digest(secret);
        let principal = match &self.keys {
            Keys::Open => Some(Principal::operator()),
            // No constant-time comparison needed: the length of a common digest prefix says nothing
            // about the key.
            Keys::Fixed(only) => (digest == *only).then(Principal::caller),
            Keys::Table(keys) => {
                let found = keys.find(&digest, guesses).await;
                found.map_err(|Unavailable| Problem::unavailable("API keys cannot be checked right now", 2))?
            }
        };
        let principal = principal.ok_or_else(|| Problem::unauthorized("the key is unknown, expired or revoked"))?;
        Ok(Principal {
            is_person: principal.is_person && self.provider.is_none(),
            ..principal
        })
    }
}

fn digest(key: &str) -> [u8; 32] {
    *blake3::hash(key.as_bytes()).as_bytes()
}

async fn check(State(auth): State<Auth>, mut request: Request, next: Next) -> Result<Response, Problem> {
    let guesses = request.extensions().get::<Guesses>().cloned().unwrap_or_default();
    let cookie = match auth.cookies {
        true => cookie::secret(request.method(), request.uri(), request.headers()),
        false => None,
    };
    let (secret, used) = match secret(request.headers()) {
        Some(secret) => (Some(secret), Use::Access),
        None => (cookie, Use::Page),
    };
    let principal = auth.holder_of(secret, used, &guesses).await?;
    let open = match &auth.limits {
        Some(limits) => limits.admit(&principal)?,
        None => None,
    };
    request.extensions_mut().insert(principal);
    let response = next.run(request).await;
    Ok(match open {
        Some(open) => until_sent(response, open),
        None => response,
    })
}

/// From `authorization: Bearer KEY`, or else from `x-api-key: KEY`, which Anthropic's clients send.
fn secret(headers: &HeaderMap) -> Option<&str> {
    let Some(value) = headers.get(header::AUTHORIZATION) else {
        return Some(headers.get("x-api-key")?.to_str().ok()?.trim());
    };
    let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| key.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::Body;
    use axum::http::StatusCode;
    use axum::routing::get;
    use tower::ServiceExt;

    #[test]
    fn the_key_is_a_bearer_token_and_the_scheme_is_case_insensitive() {
        let read = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
            secret(&headers).map(str::to_owned)
        };
        for value in ["Bearer spring_1", "bearer spring_1", "BEARER  spring_1"] {
            assert_eq!(read(value).as_deref(), Some("spring_1"), "{value}");
        }
        for value in ["Basic c3ByaW5nXzE=", "Digest spring_1", "spring_1"] {
            assert_eq!(read(value), None, "{value}");
        }
    }

    #[test]
    fn without_a_bearer_token_the_key_is_that_of_anthropics_clients() {
        let mut headers = HeaderMap::new();
        headers.insert("x-api-key", "spring_1".parse().unwrap());
        assert_eq!(secret(&headers), Some("spring_1"));
        headers.insert(header::AUTHORIZATION, "Bearer spring_2".parse().unwrap());
        assert_eq!(secret(&headers), Some("spring_2"));
    }

    #[test]
    fn a_refusal_names_the_least_scope_that_would_do() {
        let caller = Principal::with_role("default", Role::Release, "ops");
        assert!(caller.require(Scope::Release).is_ok());
        for scope in [Scope::Feedback, Scope::Generations, Scope::Research] {
            let problem = caller.require(scope).unwrap_err();
            assert_eq!(problem.status, StatusCode::FORBIDDEN);
            let why = problem.detail.unwrap();
            assert!(why.contains(&format!("key create --scope {}", scope.as_str())), "{why}");
            assert!(why.contains("has only read, release"), "{why}");
            assert!(!why.contains("admin"), "{why}");
        }
        assert!(Principal::operator().require(Scope::Release).is_ok());
    }

    #[tokio::test]
    async fn only_the_fixed_key_is_accepted() {
        let auth = Auth::fixed(Some("spring_right"));
        assert!(auth.required());
        let mut headers = HeaderMap::new();
        for (sent, scopes) in [
            (None, None),
            (Some("Bearer spring_wrong"), None),
            (Some("Bearer spring_right"), Some(Role::Serving.scopes())),
        ] {
            if let Some(sent) = sent {
                headers.insert(header::AUTHORIZATION, sent.parse().unwrap());
            }
            let principal = auth.principal(&headers).await.ok();
            assert_eq!(principal.map(|principal| principal.scopes), scopes);
        }
        assert!(!Auth::fixed(None).required());
    }

    #[tokio::test]
    async fn a_key_in_a_cookie_counts_only_for_roles_with_pages_and_after_one_in_a_header() {
        let auth = Auth::fixed(Some("spring_right"));
        for (auth, key, cookie, status) in [
            (auth.clone(), None, "spring_right", StatusCode::UNAUTHORIZED),
            (auth.clone().with_cookies(), None, "spring_right", StatusCode::OK),
            (
                auth.clone().with_cookies(),
                None,
                "spring_wrong",
                StatusCode::UNAUTHORIZED,
            ),
            (
                auth.clone().with_cookies(),
                Some("spring_wrong"),
                "spring_right",
                StatusCode::UNAUTHORIZED,
            ),
            (
                auth.with_cookies(),
                Some("spring_right"),
                "spring_wrong",
                StatusCode::OK,
            ),
        ] {
            let router = auth.protect(Router::new().route("/", get(|| async { "" })));
            let mut request = Request::builder()
                .uri("/")
                .header("cookie", format!("springtide_key={cookie}"));
            if let Some(key) = key {
                request = request.header("authorization", format!("Bearer {key}"));
            }
            let response = router.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
            assert_eq!(response.status(), status, "{key:?} {cookie}");
        }
    }

    #[tokio::test]
    async fn metrics_need_a_key_beyond_loopback() {
        let auth = Auth::fixed(Some("spring_right"));
        for (address, key, status) in [
            ("127.0.0.1:1", None, StatusCode::OK),
            ("[::1]:1", None, StatusCode::OK),
            ("10.0.0.1:1", None, StatusCode::UNAUTHORIZED),
            ("0.0.0.0:1", Some("spring_wrong"), StatusCode::UNAUTHORIZED),
            ("0.0.0.0:1", Some("spring_right"), StatusCode::OK),
        ] {
            let metrics = Router::new().route("/metrics", get(|| async { "" }));
            let router = auth.protect_beyond_loopback(metrics, address.parse().unwrap());
            let mut request = Request::builder().uri("/metrics");
            if let Some(key) = key {
                request = request.header("authorization", format!("Bearer {key}"));
            }
            let response = router.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
            assert_eq!(response.status(), status, "{address} {key:?}");
        }
    }
}
